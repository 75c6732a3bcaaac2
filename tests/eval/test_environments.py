"""Evaluations in environments: rewards of episodes, the same whatever is played at once."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
from waiting import wait_until

from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.eval.kind import run
from warmd.jobs.eval.options import EvalSpec

GAMES = str(Path(__file__).parents[1] / "environments")


@pytest.fixture(scope="module")
def model() -> Any:
    """One for all tests: an engine lives as long as its process."""
    return tiny.model(positions=512)


def spec(**options: Any) -> EvalSpec:
    small = {
        "environment": "games:Digits",
        "samples": 6,
        "max_turn_length": 6,
        "temperature": 1.0,
        "repeats": 3,
        "stop": list("abcdefghijklmnopqrstuvwxyz "),  # a random model ends most of its turns
    }
    return EvalSpec.parse(small | options).located(Path.cwd())


def job(folder: Path, model: Any) -> tiny.Surroundings:
    made = tiny.surroundings(folder, model)
    made.ctx = replace(made.ctx, code_folders=(GAMES,))
    return made


def rows_of(made: tiny.Surroundings) -> list[dict[str, Any]]:
    lines = (made.ctx.run_dir / "rows.jsonl").read_bytes().splitlines()
    return [orjson.loads(line) for line in lines]


def test_each_task_has_the_rewards_of_its_episodes_with_intervals(tmp_path, model):
    made = job(tmp_path / "run", model)
    result = run(spec(pass_k=[1, 3]), made.ctx)
    rows = rows_of(made)
    assert [row["prompt"] for row in rows] == [f"{seed}?" for seed in range(6)]
    assert all(len(row["completions"]) == 3 for row in rows)
    assert any(one["turns"] == 3 for row in rows for one in row["completions"])
    metrics = result["metrics"]
    assert list(metrics) == ["reward", "turns", "pass@1", "pass@3"]
    assert metrics["reward"]["n"] == 6
    assert metrics["reward"]["low"] < metrics["reward"]["value"] < metrics["reward"]["high"]
    assert result["data"]["dataset"] == "seeds"
    (begin,) = made.of_type("begin")
    assert begin["environment"] == "games:Digits"
    assert begin["first_prompt"] is None


@pytest.mark.slow
def test_an_episode_ends_after_its_number_of_turns(tmp_path, model):
    made = job(tmp_path / "run", model)
    run(spec(max_turns=2), made.ctx)
    turns = [one["turns"] for row in rows_of(made) for one in row["completions"]]
    assert max(turns) == 2


@pytest.mark.slow
def test_the_same_rows_however_many_are_played_at_once_and_which_is_faster(tmp_path, model):
    found = []
    for number, options in enumerate([{}, {"environment": "games:SlowDigits", "concurrency": 2}]):
        made = job(tmp_path / str(number), model)
        run(spec(**options), made.ctx)
        found.append([{k: v for k, v in row.items() if k != "question"} for row in rows_of(made)])
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_stopped_evaluation_goes_on_with_the_next_task(tmp_path, model):
    slow = spec(environment="games:SlowDigits", concurrency=1, samples=12)
    whole = job(tmp_path / "whole", model)
    run(slow, whole.ctx)
    made = job(tmp_path / "stopped", model)

    def stop() -> None:
        path = made.ctx.run_dir / "rows.jsonl"
        wait_until(lambda: path.exists() and path.read_bytes().count(b"\n") >= 3)
        made.stop.set()

    watcher = threading.Thread(target=stop)
    watcher.start()
    with pytest.raises(Stopped):
        run(slow, made.ctx)
    watcher.join()
    assert 3 <= len(rows_of(made)) < 12
    made.stop.clear()
    run(slow, made.ctx)
    assert rows_of(made) == rows_of(whole)


@pytest.mark.slow
def test_failed_episodes_are_unscored_and_a_broken_environment_ends_the_job(tmp_path, model):
    late = {"environment": "games:LateDigits", "environment_step_timeout": 3}
    made = job(tmp_path / "late", model)
    result = run(spec(**late, samples=2, environment_attempts=1), made.ctx)
    odd = rows_of(made)[1]["completions"]
    failed = [one for one in odd if one["finish_reason"] == "timeout"]
    assert failed
    assert all(one["scores"]["reward"] is None and "longer" in one["error"] for one in failed)
    assert result["metrics"]["reward"]["unscored"] == len(failed)
    made = job(tmp_path / "paid", model)
    run(spec(**late, samples=2, timeout_reward=-1), made.ctx)
    odd = rows_of(made)[1]["completions"]
    assert [one["scores"]["reward"] for one in odd if one["finish_reason"] == "timeout"] == [
        -1.0
    ] * len(failed)
    with pytest.raises(JobFailed, match=r"10 consecutive tasks.*no more cards"):
        run(
            # Each attempt costs the start of a process: one of each episode is enough.
            spec(environment="games:Broken", samples=12, environment_attempts=1),
            job(tmp_path / "broken", model).ctx,
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"task": "gsm8k"}, "task: must not go with environment"),
        ({"reward": ["math"]}, "reward: must be module:function with environment, got math"),
        ({"environment": None}, "max_turn_length: must go with environment"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(options, words):
    with pytest.raises(SpecError, match=words):
        spec(**options)


def test_all_seeds_are_no_number_of_tasks():
    with pytest.raises(SpecError, match="samples: must be a number with environment"):
        spec(samples=None).questions()
