"""Columns of the data as arguments of rewards, and held-out records that are trained on."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
from grpo_jobs import rows, spec

from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.grpo.kind import run
from warmd.jobs.rewards.problems import load
from warmd.jobs.rewards.prompts import Prompt
from warmd.jobs.rewards.reward_calls import RewardCalls
from warmd.jobs.rewards.user_rewards import MOST_REWARD, KeywordReward

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

SIZE = [1.0]


def by_keywords(completions: list[str], **columns: Any) -> list[float]:
    return [float(len(columns)) for _ in completions]


def needs_completion(completions: list[str], completion: list[str], **_: Any) -> list[float]:
    return [1.0 for _ in completions]


def large(completions: list[str], **_: Any) -> list[float]:
    return SIZE * len(completions)


@pytest.mark.parametrize("name", ["prompts", "completions", "completion_ids", "log_metric"])
def test_a_column_with_the_name_of_another_argument_is_refused_by_name(tmp_path, name):
    data = rows(tmp_path / "d.jsonl", {"prompt": "a", name: "x"}, {"prompt": "b"})
    found = spec(samples=2, dataset=data, reward=[f"{__name__}:by_keywords"])
    with pytest.raises(SpecError, match=rf"^dataset: must have no column {name}, which rewards"):
        found.check_inputs(None)
    renamed = spec(
        samples=1, dataset=data, reward=[f"{__name__}:by_keywords"], columns=[f"other={name}"]
    )
    renamed.check_inputs(None)
    spec(samples=2, dataset=data, reward=["math"]).check_inputs(None)


@pytest.mark.parametrize("name", ["self", "class", "row", "name", "function", "é t"])
def test_a_column_may_have_any_other_name_also_one_of_python(name):
    prompt = Prompt("a", [1], None, 1, False, {name: "x"}, None)
    seen: dict[str, Any] = {}

    def reward(completions: list[str], **columns: Any) -> list[float]:
        seen.update(columns)
        return [1.0]

    with RewardCalls({"r": KeywordReward("r", reward)}, [prompt]) as calls:
        assert calls.score([prompt], ["b"], [[2]]).scores == [[1.0]]
    assert seen[name] == ["x"]


def test_the_column_that_trl_does_not_pass_is_none_for_a_reward(tmp_path):
    data = rows(tmp_path / "d.jsonl", {"prompt": "a", "completion": "x"})
    found = spec(samples=1, dataset=data, reward=[f"{__name__}:needs_completion"])
    with pytest.raises(SpecError, match=r"the parameter completion must be a column of the data"):
        found.check_inputs(None)


def test_a_reward_that_float32_cannot_hold_ends_the_job_by_name(tmp_path, monkeypatch):
    data = rows(tmp_path / "d.jsonl", {"prompt": "a"})
    job = spec(samples=1, dataset=data, reward=[f"{__name__}:large"])
    for size in (1e39, -1e300, 2 * MOST_REWARD):
        monkeypatch.setitem(globals(), "SIZE", [size])
        with pytest.raises(JobFailed, match=r"must return numbers from -1e\+15 to 1e\+15, got "):
            run(job, tiny.surroundings(tmp_path / f"run{size}").ctx)


@pytest.mark.slow
def test_what_is_not_read_is_counted_in_the_begin_event(tmp_path):
    line = b'{"prompt": "1+1="}\n'
    (tmp_path / "d.jsonl").write_bytes(b"\n" + line + b"[]\n")
    (tmp_path / "e.csv").write_bytes(b"prompt\n\n2+2=\n")
    job = tiny.surroundings(tmp_path / "run")
    options = {"dataset": str(tmp_path / "d.jsonl"), "eval_dataset": str(tmp_path / "e.csv")}
    run(spec(samples=1, prompts_per_step=1, skip_bad_rows=True, **options), job.ctx)
    # The bad record stands after the last sample: it is not read.
    assert job.of_type("begin")[0]["left_out"] == "blank lines: 1"


@pytest.mark.slow
def test_held_out_prompts_that_are_trained_on_are_counted_in_a_warning(tmp_path):
    data = rows(tmp_path / "d.jsonl", *({"prompt": f"{n}"} for n in range(6)))
    apart = rows(tmp_path / "e.jsonl", *({"prompt": f"{n}"} for n in range(4, 9)))
    job = tiny.surroundings(tmp_path / "run")
    run(spec(dataset=data, eval_dataset=apart, eval_samples=5), job.ctx)
    [warning] = [w for w in job.of_type("warning") if "rows_shared" in w]
    assert warning["rows_shared"] == 2
    assert "eval_dataset: 2 of the 5 held-out records are also trained on" in warning["message"]
    assert len(load(data)) == 6
