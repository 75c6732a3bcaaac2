"""Plans of a time limit: how many steps fit, and a learning rate without jumps."""

from __future__ import annotations

import errno
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import get_scheduler

from warmd.daemon.gateway.api import methods
from warmd.daemon.runs.running_time import running_s
from warmd.jobs import spec_class
from warmd.jobs.errors import SpecError
from warmd.jobs.files.shortage import Patience
from warmd.jobs.mlm.options import MlmSpec
from warmd.jobs.training.options import SCHEDULES
from warmd.jobs.training.time_plan import DECAYS, Plan, Times, next_share, plan_after, rate

TIMES = Times(limit_s=100.0, running_s=10.0, step_s=0.5, evaluation_s=4.0, save_s=1.0, eval_every=0)
# So that the steps of a plan are the given number.
SECONDS = replace(TIMES, step_s=1.0, evaluation_s=None, save_s=None, running_s=0.0)


def planned(
    found: list[tuple[int, int]], decay: str = "linear", warmup: int = 0, **how: Any
) -> list[Plan]:
    """Plans made after a step, each with so many steps in all."""
    plans: list[Plan] = []
    for step, steps in found:
        times = replace(SECONDS, limit_s=float(steps - step))
        how = {"warmup_of": lambda steps: warmup, **how}
        plans.append(
            plan_after(step, times, plans, most=10**9, decay=DECAYS[decay], warmup=warmup, **how)
        )
    return plans


def rates(plans: list[Plan], decay: str = "linear", warmup: int = 0) -> list[float]:
    return [rate(plans, DECAYS[decay], warmup, step) for step in range(plans[-1].steps + 1)]


def test_the_steps_fit_into_the_time_without_the_last_evaluation_and_checkpoint():
    assert TIMES.steps_left == 170
    assert replace(TIMES, evaluation_s=None, save_s=None).steps_left == 180
    assert replace(TIMES, eval_every=10).steps_left == 94  # 0.9 s a step
    assert replace(TIMES, running_s=96.0).steps_left == 0
    assert replace(TIMES, running_s=200.0).steps_left == 0


def test_a_plan_after_the_time_has_no_further_step():
    times = replace(TIMES, running_s=200.0)
    how: Any = {"most": 99, "decay": DECAYS["linear"], "warmup": 0, "warmup_of": lambda steps: 0}
    assert plan_after(7, times, [], **how).steps == 7
    assert plan_after(7, replace(times, running_s=0.0), [], **how).steps == 99


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 6])
def test_a_plan_before_the_first_step_has_the_learning_rates_of_transformers(name, warmup):
    if name == "constant" and warmup:
        return  # refused by the options
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    how = {} if name == "constant" else {"num_warmup_steps": warmup}
    schedule = get_scheduler(name, optimizer, num_training_steps=20, **how)
    factor: Any = schedule.lr_lambdas[0]
    plans = planned([(0, 20)], name, warmup)
    assert rates(plans, name, warmup) == pytest.approx([factor(step) for step in range(21)])


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 200)), min_size=1, max_size=4),
    st.sampled_from(["linear", "cosine"]),
    st.integers(0, 30),
)
def test_the_learning_rate_is_continuous_and_ends_at_0(found, decay, warmup):
    after, points = 0, []
    for pause, more in found:
        after += pause
        points.append((after, after + more))
    points = [(at, max(end, points[-1][0] + 1)) for at, end in points]
    plans = planned(points, decay, warmup)
    values = rates(plans, decay, warmup)
    for plan, (at, _) in zip(plans, points, strict=True):
        earlier = [one for one in plans if one.after < at]
        assert rate(plans, DECAYS[decay], warmup, at) == pytest.approx(
            rate(earlier, DECAYS[decay], warmup, at)
        )
        assert plan.factor == pytest.approx(values[at])
    full = max(warmup, points[0][0])
    assert all(a >= b - 1e-12 for a, b in zip(values[full:], values[full + 1 :], strict=False))
    if plans[-1].steps > max(plans[-1].after, plans[-1].warmup):
        assert values[-1] == pytest.approx(0.0, abs=1e-12)


def test_a_warmup_that_turns_out_shorter_ends_with_the_next_step():
    plans = planned([(10, 50)], warmup=500, warmup_of=lambda steps: steps // 10)
    values = rates(plans, warmup=500)
    assert values[:11] == pytest.approx([step / 500 for step in range(11)])
    assert values[11] == 1.0
    assert values[-1] == 0.0


def test_another_limit_has_the_learning_rates_of_a_training_of_the_new_length():
    plans = planned([(4, 10)])
    longer = plan_after(
        10,
        replace(SECONDS, limit_s=10.0),
        plans,
        most=99,
        decay=DECAYS["linear"],
        warmup=0,
        warmup_of=lambda steps: 0,
        is_revised=True,
    )
    assert rates(plans)[-1] == 0.0
    assert longer.steps == 20
    assert rates([*plans, longer])[10] == pytest.approx(0.5)
    assert rates([*plans, longer])[20] == 0.0


def test_the_last_plan_is_the_one_after_four_fifths_of_the_time():
    [plan] = planned([(4, 10)])
    shares = {0.02: 0.1, 0.1: 0.5, 0.3: 0.5, 0.79: 0.8, 0.8: None, 1.2: None}
    for share, following in shares.items():
        made = replace(plan, running_s=share * plan.limit_s)
        assert next_share(made) == following
        assert made.is_last == (following is None)


# Options.

DATA = {"sft": {"dataset": "rows.jsonl"}, "dpo": {"dataset": "rows.jsonl"}, "grpo": {}, "mlm": {}}


@pytest.mark.parametrize("kind", DATA)
def test_a_time_limit_excludes_steps_by_name(kind):
    given = {**DATA[kind], "time_limit": "5m"}
    spec: Any = spec_class(kind).parse(given)
    assert (spec.steps_total, spec.time_limit_s) == (None, 300.0)
    with pytest.raises(SpecError, match=r"^time_limit: must not go with steps, got 5m with steps"):
        spec_class(kind).parse({**given, "steps": 1000})
    if kind != "mlm":
        with pytest.raises(SpecError, match=r"^epochs: must not go with time_limit, got 3 with"):
            spec_class(kind).parse({**given, "epochs": 3})


@pytest.mark.parametrize("kind", DATA)
def test_a_request_over_http_may_set_a_time_limit(kind):
    http = methods.method_of(kind)
    assert http is not None
    assert "time_limit" in methods.options_over_http(kind, http)
    methods.check_changes(kind, {"time_limit": "10m"})


@pytest.mark.parametrize("text", ["5", "0s", "-1m", "soon", "99999d"])
def test_a_wrong_time_limit_is_refused_by_name(text):
    with pytest.raises(SpecError, match=r"^time_limit: must .*, got"):
        MlmSpec.parse({"time_limit": text})


def test_a_resume_changes_the_limit_but_not_between_limit_and_steps():
    limited = MlmSpec.parse({"time_limit": "5m"})
    changed = limited.revised({"time_limit": "10m"})
    assert changed.changes(limited.to_json()) == {"time_limit": ["5m", "10m"]}
    for old, new in (
        (limited, {"time_limit": None}),
        (limited, {"time_limit": "none", "steps": 7}),
        (MlmSpec.parse({"steps": 7}), {"time_limit": "5m", "steps": None}),
    ):
        with pytest.raises(SpecError, match=r"^time_limit: cannot be set or unset on resume") as it:
            old.revised(new)
        assert "--init-from JOB" in str(it.value)
    with pytest.raises(SpecError, match=r"^time_limit: must not go with steps"):
        limited.revised({"steps": 7})


def test_the_steps_of_mlm_are_1000_by_default():
    assert MlmSpec.parse({}).steps_total == 1000
    assert MlmSpec.parse({}).warmup == 100
    assert MlmSpec.parse({"steps": 50}).warmup == 5


# The running time of earlier executions.


def test_the_running_time_is_that_of_all_executions_without_pauses():
    def event(execution: int, at: float, kind: str, **fields: Any) -> dict[str, Any]:
        return {"execution": execution, "time": at, "type": kind, **fields}

    logged = [
        event(1, 90.0, "revised"),
        event(1, 100.0, "started"),
        event(1, 110.0, "paused"),
        event(1, 120.0, "waiting"),
        event(1, 130.0, "waited"),
        event(1, 150.0, "unpaused"),
        event(1, 160.0, "step"),
        event(1, 161.0, "waiting", what="disk space"),
        event(1, 181.0, "waited", seconds=20.0),
        event(1, 182.0, "requeued"),
        event(1, 500.0, "warning"),
        event(2, 600.0, "started"),
        event(2, 620.0, "paused", released=True),
        event(3, 700.0, "started"),
        event(3, 705.0, "step"),  # killed with its worker
        event(4, 900.0, "started"),
        event(4, 950.0, "step"),
    ]
    assert running_s(logged, before=1) == 0.0
    assert running_s(logged, before=2) == 22.0
    assert running_s(logged, before=4) == 22.0 + 20.0 + 5.0


def test_waits_for_a_full_disk_are_counted_apart():
    patience, tries = Patience(threading.Event()), []

    def write() -> int:
        tries.append(patience.waited_s)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return 7

    began = time.monotonic()
    assert patience.write(write) == 7
    taken, waited_s = time.monotonic() - began, patience.waited_s
    assert tries[0] == 0.0 < tries[1] < tries[2] <= waited_s <= taken
    assert patience.waited_s == waited_s
