"""The file of completions: whole, each step once, bounded, and without it no job ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny

from warmd.daemon.runs import completions as kept_completions
from warmd.daemon.runs.completions import FIELDS, Wanted
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.grpo import completions
from warmd.jobs.grpo.completions import Completions
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def spec(**options: Any) -> GrpoSpec:
    small = {
        "samples": 6,
        "num_generations": 4,
        "max_completion_length": 6,
        "reward": ["tiny:digit_share", "general=0.5"],
        "learning_rate": 1e-2,
        "save_every": 1,
        "log_completions": 2,
    }
    return GrpoSpec.parse(small | options)


def file_of(folder: Path) -> Path:
    return folder / completions.FILE


def rows(number: int, size: int = 10) -> Iterator[dict[str, Any]]:
    for member in range(number):
        yield {"row": member, "completion": "x" * size, "reward": float(member)}


def steps_of(path: Path) -> list[int]:
    return sorted({row["step"] for row in completions.read(path)})


def test_each_completion_is_whole_with_prompt_answer_rewards_and_advantage(tmp_path):
    job = tiny.surroundings(tmp_path)
    run(spec(log_completions=1), job.ctx)
    problems = {problem.row: problem for problem in spec().parts.training}
    found = list(completions.read(file_of(job.ctx.run_dir)))
    assert len(found) == 6 * 4
    for event in job.of_type("step"):
        of_step = [one for one in found if one["step"] == event["step"]]
        assert {one["group"] for one in of_step} == {0}
        assert [one["completion"] for one in of_step[:2]] == [
            one["completion"] for one in event["samples"]
        ]
        rewards = [one["reward"] for one in of_step]
        assert event["reward"] == pytest.approx(sum(rewards) / 4)
        assert sum(one["advantage"] for one in of_step) == pytest.approx(0, abs=1e-5)
        assert event["completion_length"] == sum(one["tokens"] for one in of_step) / 4
        assert event["clipped"] == sum(one["stop"] == "length" for one in of_step) / 4
        for one in of_step:
            assert set(one) == set(FIELDS)
            named = one["rewards"]
            total = named["tiny:digit_share"] + 0.5 * named["general"]
            assert one["reward"] == pytest.approx(total)
            problem = problems[one["row"]]
            assert (one["prompt"], one["answer"]) == (problem.prompt, problem.answer)
    (begin,) = job.of_type("begin")
    assert begin["keeps_completions"] == {
        "every": 1,
        "latest": completions.LATEST,
        "most_bytes": completions.MOST_BYTES,
    }


def test_none_are_kept_if_none_are_wanted(tmp_path):
    job = tiny.surroundings(tmp_path)
    run(spec(log_completions=0), job.ctx)
    assert list(completions.read(file_of(job.ctx.run_dir))) == []
    assert all(event["samples"] == [] for event in job.of_type("step"))
    assert job.of_type("begin")[0]["keeps_completions"] is None


LATER = pytest.mark.nightly(
    part="episodes", catches="completions that a resume from a checkpoint repeats"
)


@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", [2, pytest.param(5, marks=LATER)])
def test_after_a_resume_the_file_has_each_step_once(tmp_path, stopped_at):
    whole = tiny.surroundings(tmp_path / "whole")
    run(spec(), whole.ctx)
    first = tiny.surroundings(tmp_path / "run")
    first.raise_at_step[stopped_at] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(spec(), first.ctx)
    with file_of(first.ctx.run_dir).open("ab") as file:
        file.write(b'{"step":6,"row":')  # a torn write
    run(spec(), tiny.surroundings(tmp_path / "run").ctx)
    resumed = file_of(first.ctx.run_dir)
    assert resumed.read_bytes() == file_of(whole.ctx.run_dir).read_bytes()


def test_every_tenth_and_the_latest_steps_stay_and_the_oldest_go_first(tmp_path, monkeypatch):
    monkeypatch.setattr(completions, "_LEAST_DROPPED", 1)
    path = tmp_path / "file"
    kept = Completions(path, every=10, step=0, most_bytes=10_000)
    for step in range(1, 48):
        kept.add(step, rows(1))
    promised = [10, 20, 30, 40, 43, 44, 45, 46, 47]
    assert set(promised) <= set(steps_of(path))
    assert len(steps_of(path)) <= 2 * len(promised)  # at most half of the file is of others
    for step in range(48, 400):
        kept.add(step, rows(4, size=100))
        assert path.stat().st_size <= 10_000
    found = steps_of(path)
    assert found[-5:] == [395, 396, 397, 398, 399]
    tens = [step for step in found if step % 10 == 0]
    assert tens == list(range(tens[0], 400, 10))  # without gaps
    assert tens[0] > 100
    kept.close()
    # As it is opened again after an interruption.
    reopened = Completions(path, every=10, step=396, most_bytes=10_000)
    assert steps_of(path) == [step for step in found if step <= 396]
    reopened.add(397, rows(2))
    assert steps_of(path)[-1] == 397
    reopened.close()


@pytest.fixture
def shrinking(tmp_path, monkeypatch):
    """A file that is written anew with step 11: then more than half of it is not kept."""
    monkeypatch.setattr(completions, "_LEAST_DROPPED", 1)
    kept = Completions(tmp_path / "file", every=100, step=0)
    for step in range(1, 11):
        kept.add(step, rows(1))
    assert steps_of(tmp_path / "file") == list(range(1, 11))
    yield kept
    kept.close()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_file_that_cannot_be_written_anew_loses_nothing(tmp_path, monkeypatch, shrinking, error):
    path = tmp_path / "file"

    def failing(*_: Any) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr("warmd.jobs.files.atomic.os.fsync", failing)
        if isinstance(error, OSError):
            for step in (11, 12):
                shrinking.add(step, rows(1))
        else:
            with pytest.raises(KeyboardInterrupt):
                shrinking.add(11, rows(1))
    last = 12 if isinstance(error, OSError) else 11
    assert steps_of(path) == list(range(1, last + 1))
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    if isinstance(error, OSError):  # it is tried again, but not at once
        for step in range(13, 111):
            shrinking.add(step, rows(1))
        assert len(steps_of(path)) == 110
        shrinking.add(111, rows(1))
        assert steps_of(path) == [100, 107, 108, 109, 110, 111]


def test_what_a_killed_writer_has_left_is_removed(tmp_path):
    (tmp_path / ".file.tmp").write_bytes(b"x")
    Completions(tmp_path / "file", every=1, step=0).close()
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("line", [b'{"row": 1}', b'{"step": "9"}', b"[]", b"\0\0"])
def test_a_damaged_line_ends_the_file_and_not_the_job(tmp_path, line):
    path = tmp_path / "file"
    kept = Completions(path, every=1, step=0)
    kept.add(1, rows(2))
    kept.close()
    whole = path.read_bytes()
    path.write_bytes(whole + line + b"\n")
    Completions(path, every=1, step=5).close()
    assert path.read_bytes() == whole


@pytest.mark.slow
def test_a_full_disk_is_one_warning_and_the_training_goes_on(tmp_path, monkeypatch):
    job = tiny.surroundings(tmp_path)
    add = Completions.add

    def until_full(self: Completions, step: int, found: Any) -> None:
        if step in (2, 3, 5):
            raise OSError(28, "No space left on device")
        add(self, step, found)

    monkeypatch.setattr(Completions, "add", until_full)
    run(spec(log_completions=1), job.ctx)
    assert steps_of(file_of(job.ctx.run_dir)) == [1, 4, 6]
    warned = [one["step"] for one in job.of_type("warning") if "completions:" in one["message"]]
    assert warned == [2, 5]


def test_a_text_that_is_not_unicode_is_kept_with_a_sign_in_its_place(tmp_path):
    kept = Completions(tmp_path / "file", every=1, step=0)
    kept.add(1, [{"completion": "a\ud800b", "rewards": {"r": float("nan")}}])
    kept.close()
    assert list(completions.read(tmp_path / "file")) == [
        {"step": 1, "completion": "a?b", "rewards": {"r": None}}
    ]


def test_they_are_selected_by_step_row_text_and_reward(tmp_path):
    found = [
        {"step": step, "row": row, "completion": f"Answer {step * row}", "reward": float(row)}
        for step in (1, 2, 3)
        for row in (4, 5, 6)
    ]

    def selected(**wanted: Any) -> list[tuple[int, int]]:
        return [(one["step"], one["row"]) for one in Wanted(**wanted).select(iter(found))]

    assert selected() == [(3, 4), (3, 5), (3, 6)]
    assert selected(step=2) == [(2, 4), (2, 5), (2, 6)]
    assert selected(row=5) == [(1, 5), (2, 5), (3, 5)]
    assert selected(text="answer 12") == [(2, 6), (3, 4)]
    assert selected(worst=2) == [(3, 4), (3, 5)]
    assert selected(step=1, best=1) == [(1, 6)]
    assert selected(step=4) == []


def test_a_run_of_an_earlier_version_shows_what_its_events_have(tmp_path):
    sample = {"prompt": "1+1", "completion": "2", "rewards": {"correctness": 1.0}}
    other = {**sample, "rewards": {"correctness": 1.0, "form": 0.5}}  # of unknown weights
    event = {"type": "step", "step": 7, "samples": [sample, other]}
    (tmp_path / "events.jsonl").write_bytes(
        orjson.dumps({"seq": 1, "execution": 1, "time": 1.0, **event}) + b"\n"
    )
    empty = dict.fromkeys(FIELDS)
    assert list(kept_completions.read(RunDir(tmp_path))) == [
        {**empty, "step": 7, "reward": 1.0, **sample},
        {**empty, "step": 7, **other},
    ]


@pytest.mark.parametrize(
    ("stored", "every"), [({"log_completions": 2}, 10), ({}, 10), ({"log_completions": 0}, 0)]
)
def test_a_job_of_an_earlier_version_keeps_them_like_others(stored, every):
    """The option was the number of completions in an event."""
    stored |= {"reward_log": "/tmp/log.jsonl"}
    assert GrpoSpec.of_stored(stored)["log_completions"] == every
    begun = GrpoSpec.parse(GrpoSpec.of_stored(stored))
    resumed = begun.revised({"log_completions": 3}).to_json()
    assert GrpoSpec.of_stored(resumed)["log_completions"] == 3
    assert resumed["reward_log"] == "/tmp/log.jsonl"
