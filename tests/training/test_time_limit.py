"""Trainings with a time limit: they end as planned, and a killed one at the same step."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dpo_jobs
import mlm_jobs
import orjson
import pytest
import sft_jobs
import tiny
import torch
from safetensors.torch import load_file

from warmd.daemon.runs.events import EventLog, read
from warmd.daemon.runs.running_time import running_s
from warmd.jobs import run_function
from warmd.jobs.errors import JobFailed, Stopped
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.sft.kind import run
from warmd.jobs.sft.options import SftSpec
from warmd.jobs.training.time_limit import FILE
from warmd.jobs.training.time_plan import DECAYS, Plan, rate

pytestmark = [pytest.mark.usefixtures("like_a_work_horse"), pytest.mark.slow]

LEARNING_RATE = 1e-3
# A machine may be busy; the limits of these tests are a few seconds.
PATIENCE_S = 60.0


OPENED: list[EventLog] = []


@pytest.fixture(autouse=True)
def closed_logs() -> Iterator[None]:
    """Close the event logs of the executions that a test began."""
    yield
    while OPENED:
        OPENED.pop().__exit__()


def spec(folder: Path, limit: str = "2s", **options: Any) -> SftSpec:
    folder.mkdir(exist_ok=True)
    usual = {"learning_rate": LEARNING_RATE, "eval_samples": 4, "save_every": 20}
    return sft_jobs.spec(folder, time_limit=limit, **usual | options)


@pytest.fixture(autouse=True, scope="module")
def warmed_up(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Import what a training needs, as the daemon has before a job begins."""
    folder = tmp_path_factory.mktemp("first")
    run(sft_jobs.spec(folder, steps=1), tiny.surroundings(folder / "run").ctx)


def execution(folder: Path, on_event: Callable[[str, int], object] | None = None) -> Any:
    """The surroundings of the next execution of a job, as its horse makes them.

    `on_event` is called after each event, with its type and how many of that type there were.
    """
    job = tiny.surroundings(folder)
    path = folder / "events.jsonl"
    number = 1 + sum(event["type"] == "started" for event in read(path))
    log, count = EventLog(path, execution=number), dict[str, int]()
    OPENED.append(log)
    keep = job.emit

    def emit(type: str, /, *, step: int | None = None, **fields: Any) -> None:
        log.emit(type, step=step, **fields)
        keep(type, step=step, **fields)
        count[type] = count.get(type, 0) + 1
        if on_event is not None:
            on_event(type, count[type])

    ran_s = running_s(read(path), before=number)
    for name, value in {"emit": emit, "ran_s": ran_s, "latest_step": log.latest_step}.items():
        object.__setattr__(job.ctx, name, value)
    emit("started")
    return job


def plans(folder: Path) -> list[Plan]:
    return [Plan(**plan) for plan in orjson.loads((folder / FILE).read_bytes())["plans"]]


def logged(folder: Path, type: str) -> list[dict[str, Any]]:
    return [event for event in read(folder / "events.jsonl") if event["type"] == type]


def assert_as_planned(folder: Path, result: dict[str, Any]) -> list[Plan]:
    """Check that a job has done the steps of its plans, each once, at the planned rates."""
    made = plans(folder)
    steps = logged(folder, "step")
    assert [event["step"] for event in steps] == list(range(1, made[-1].steps + 1))
    assert result["steps"] == result["plan"]["steps"] == made[-1].steps
    assert result["plan"]["plans"] == len(made)
    expected = [
        LEARNING_RATE * rate(made, DECAYS["linear"], 0, event["step"] - 1) for event in steps
    ]
    assert [event["learning_rate"] for event in steps] == pytest.approx(expected)
    assert (folder / "model" / "model.safetensors").is_file()
    return made


def assert_same_weights(one: Path, other: Path) -> None:
    ours, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def twin_of(folder: Path, limit: str = "2s") -> Path:
    """Run a job without interruption by the recorded plans of another one."""
    twin = folder.with_name(f"{folder.name}-twin")
    twin.mkdir()
    shutil.copyfile(folder / FILE, twin / FILE)
    job = execution(twin)
    object.__setattr__(job.ctx, "latest_step", 10**9)  # so that it makes no plan of its own
    run(spec(folder, limit), job.ctx)
    return twin


def test_a_job_fills_its_time_and_ends_as_finished_with_model_and_evaluation(tmp_path):
    def steady(type: str, number: int) -> None:
        # So much longer than a step computes that a busy machine that becomes idle changes a plan
        # by little: else the job would do its steps before the time of the last plan.
        if type == "step":
            time.sleep(0.1)

    began = time.monotonic()
    job = execution(tmp_path / "run", steady)
    result = run(spec(tmp_path / "run"), job.ctx)
    assert time.monotonic() - began < PATIENCE_S
    made = assert_as_planned(tmp_path / "run", result)
    assert result["eval_before"]["n"] == result["eval_after"]["n"] == 4
    assert [event["phase"] for event in job.of_type("eval")] == ["before", "after"]
    assert len(made) >= 2
    assert made[-1].is_last
    assert [one.after for one in made] == sorted({one.after for one in made})
    told = job.of_type("plan")
    assert [event["steps_total"] for event in told] == [one.steps for one in made]
    assert all(event["left_s"] >= 0 and event["step_s"] > 0 for event in told)
    assert made[0].evaluation_s is not None  # of the evaluation before the first step
    # Each step says how many there are, once it is known.
    totals = [event["steps_total"] for event in job.of_type("step")]
    assert totals[0] is None
    assert totals[-1] == made[-1].steps
    again = execution(tmp_path / "run")
    repeated = run(spec(tmp_path / "run"), again.ctx)
    assert (repeated["steps"], repeated["eval_after"]) == (result["steps"], result["eval_after"])
    assert again.of_type("step") == []


def kill_at(wanted: str, wanted_number: int) -> Callable[[str, int], None]:
    def kill(type: str, number: int) -> None:
        if (type, number) == (wanted, wanted_number):
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


OTHER_MOMENTS = pytest.mark.nightly(
    part="storms", catches="a moment at which a kill changes the steps that a time limit allows"
)


@pytest.mark.parametrize(
    "moments",
    [
        pytest.param([("step", 3)], id="before the first plan", marks=OTHER_MOMENTS),
        pytest.param([("plan", 1)], id="at the first plan", marks=OTHER_MOMENTS),
        pytest.param([("plan", 2), ("step", 30), ("checkpoint", 1)], id="three times"),
        pytest.param([("plan", 4)], id="at the last plan", marks=OTHER_MOMENTS),
        pytest.param([("eval", 2)], id="after the last evaluation", marks=OTHER_MOMENTS),
    ],
)
def test_a_killed_job_ends_at_the_recorded_step_with_the_weights_of_an_uninterrupted_one(
    moments, tmp_path
):
    folder = tmp_path / "run"
    for moment in moments:
        known = [plan.after for plan in plans(folder)] if (folder / FILE).exists() else []
        child = os.fork()
        if child == 0:
            run(spec(folder), execution(folder, kill_at(*moment)).ctx)
            os._exit(0)
        ended = os.waitpid(child, 0)[1]
        if os.WIFEXITED(ended):  # so few plans or steps were left: nothing to be killed in
            assert os.WEXITSTATUS(ended) == 0
        if known:
            assert [plan.after for plan in plans(folder)][: len(known)] == known
    killed_at = max((event["step"] for event in logged(folder, "step")), default=0)
    before = plans(folder) if (folder / FILE).exists() else []
    result = run(spec(folder), execution(folder).ctx)
    made = assert_as_planned(folder, result)
    assert made[: len(before)] == before
    assert all(plan.after > killed_at for plan in made[len(before) :])
    if before and before[-1].is_last and len(made) == len(before):
        assert result["steps"] == before[-1].steps
    assert_same_weights(folder, twin_of(folder))


def test_steps_that_become_much_slower_end_the_job_early_by_a_recorded_plan(tmp_path):
    is_slow: list[bool] = []

    def slow_down(type: str, number: int) -> None:
        # So much longer than a step computes that a busy machine hardly changes the plan: without
        # steps after the last plan nothing could become slower than planned.
        if type == "step":
            time.sleep(0.5 if is_slow else 0.1)
        if type == "plan" and plans(tmp_path / "run")[-1].is_last:
            is_slow.append(True)

    job = execution(tmp_path / "run", slow_down)
    result = run(spec(tmp_path / "run", "4s"), job.ctx)
    *_, before, last = assert_as_planned(tmp_path / "run", result)
    assert last.after == last.steps < before.steps
    [warning] = [w for w in job.of_type("warning") if "time_limit" in w["message"]]
    assert f"ends after step {last.steps}, not {before.steps}" in warning["message"]
    assert [event["phase"] for event in job.of_type("eval")] == ["before", "after"]
    assert_same_weights(tmp_path / "run", twin_of(tmp_path / "run", "4s"))


def test_a_first_step_beyond_the_limit_is_the_last_one(tmp_path):
    def wait(type: str, number: int) -> None:
        if type == "begin":
            time.sleep(0.5)

    job = execution(tmp_path / "run", wait)
    result = run(spec(tmp_path / "run", "0.4s"), job.ctx)
    assert result["steps"] == 1
    assert_as_planned(tmp_path / "run", result)
    assert result["eval_after"] is not None


def test_a_longer_limit_extends_a_finished_job(tmp_path):
    folder = tmp_path / "run"
    first = run(spec(folder, "1s"), execution(folder).ctx)
    before = plans(folder)
    job = execution(folder)
    second = run(spec(folder, "1s").revised({"time_limit": "3s"}), job.ctx)
    made = assert_as_planned(folder, second)
    assert made[: len(before)] == before
    assert made[len(before)].after == first["steps"] < second["steps"]
    assert 0 < made[len(before)].factor < 1
    [revised] = job.of_type("revised")
    assert revised["changes"] == {"time_limit": ["1s", "3s"]}
    assert_same_weights(folder, twin_of(folder, "3s"))


def test_a_shorter_limit_ends_a_stopped_job_at_its_checkpoint(tmp_path):
    folder = tmp_path / "run"
    first = execution(folder)
    first.stop_at_step = 30
    with pytest.raises(Stopped):
        run(spec(folder, "10m"), first.ctx)
    job = execution(folder)
    result = run(spec(folder, "10m").revised({"time_limit": "0.01s"}), job.ctx)
    assert result["steps"] == result["plan"]["steps"] == 30
    assert job.of_type("step") == []
    assert [event["phase"] for event in job.of_type("eval")] == ["after"]
    assert (folder / "model" / "model.safetensors").is_file()


def test_a_pause_is_no_running_time(tmp_path):
    job = execution(tmp_path / "run")
    pause = itertools.chain([False] * 10, [True] * 15, itertools.repeat(False))

    class Pause:
        def is_set(self) -> bool:
            return next(pause)

    object.__setattr__(job.ctx, "pause", Pause())
    result = run(spec(tmp_path / "run"), job.ctx)
    assert job.of_type("unpaused")
    assert result["plan"]["running_s"] < time.monotonic() - job.ctx.began - 1.0
    assert_as_planned(tmp_path / "run", result)


def test_a_damaged_plan_file_fails_the_job_by_name(tmp_path):
    folder = tmp_path / "run"
    job = spec(folder)
    (folder / FILE).write_text("{")
    with pytest.raises(JobFailed, match=rf"^{FILE}: cannot be read"):
        run(job, execution(folder).ctx)


def test_a_lost_plan_file_is_replaced_by_the_plans_of_the_checkpoint(tmp_path):
    folder = tmp_path / "run"
    first = run(spec(folder), execution(folder).ctx)
    made = plans(folder)
    (folder / FILE).unlink()
    again = execution(folder)
    assert run(spec(folder), again.ctx)["steps"] == first["steps"] == made[-1].steps
    assert again.of_type("step") == []


def grpo_spec(folder: Path, **length: Any) -> GrpoSpec:
    # A step that generates takes much longer than the one that follows.
    how: dict[str, Any] = {"samples": 8, "num_generations": 4, "max_completion_length": 6}
    how |= {"reward": ["tiny:digit_share"], "num_iterations": 2, "eval_samples": 4}
    return GrpoSpec.parse({**how, **length})


def dpo_spec(folder: Path, **length: Any) -> Any:
    return dpo_jobs.spec(folder, eval_samples=4, **length)


def mlm_spec(folder: Path, **length: Any) -> Any:
    if not (folder / "runs").exists():
        mlm_jobs.make_home(folder)
    how: dict[str, Any] = {"steps": None, "save_every": "50", "eval_every": 50}
    return mlm_jobs.text_spec(folder, **how | length)


OTHER_KINDS = pytest.mark.nightly(
    part="oracles", catches="a kind of training that ends before or after its time limit"
)


@pytest.mark.parametrize(
    "make", [grpo_spec, *(pytest.param(one, marks=OTHER_KINDS) for one in (dpo_spec, mlm_spec))]
)
def test_every_kind_of_training_takes_a_time_limit(make, tmp_path):
    short = make(tmp_path, steps=1)  # for the imports
    (tmp_path / "runs").mkdir(exist_ok=True)
    run_function(short.kind)(short, tiny.surroundings(tmp_path / "runs" / "first").ctx)
    made = make(tmp_path, time_limit="2s")
    folder = tmp_path / "runs" / "run"
    folder.mkdir()
    job = execution(folder)
    result = run_function(made.kind)(made, job.ctx)
    found = plans(folder)
    assert result["steps"] == found[-1].steps == job.last_step
    assert (folder / "model" / "model.safetensors").is_file()
    assert job.of_type("eval")[-1]["phase"] == "after"
    full, warmup = job.of_type("begin")[0]["learning_rate"], made.warmup_for(10**9)
    for event in job.of_type("step"):
        share = rate(found, DECAYS["linear"], warmup, event["step"] - 1)
        assert event["learning_rate"] == pytest.approx(full * share)
    rounds = made.steps_per_round
    assert all(plan.after % rounds == 0 for plan in found if plan.steps > plan.after)
    assert asdict(found[0])["limit_s"] == 2.0
