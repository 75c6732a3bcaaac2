"""A sweep whose process is killed: each job is queued exactly once, each decision is made once."""

from __future__ import annotations

import pytest
from worked_sweeps import (
    advance,
    advance_killed,
    lines_of_advance,
    planned,
    play_to,
    queued,
)

from warmd.daemon.groups.sweep import SweepFolder
from warmd.daemon.runs import labels

RATES = {"sweep": ["learning_rate=1e-6,1e-5,1e-4"]}
MANY = pytest.mark.nightly(
    part="storms", catches="a line of the code of a sweep at which a kill loses or repeats a job"
)
POINTS = [
    pytest.param(6, id="some-lines"),
    pytest.param(50, id="many-lines", marks=MANY),
]


def spread(lines: int, points: int) -> list[int]:
    """Up to so many of the lines 1, 2, …, evenly spread, with the first and the last."""
    assert lines > 100  # it has lines to be killed at
    return sorted({1 + round(n * (lines - 1) / (points - 1)) for n in range(points)})


@pytest.mark.slow
@pytest.mark.parametrize("points", POINTS)
def test_a_submission_killed_anywhere_is_finished_with_each_job_queued_once(desk, points):
    lines = lines_of_advance(desk, complete := planned(desk, **RATES))
    remove(desk, complete)
    for line in spread(lines, points):
        sweep_id = planned(desk, **RATES)
        advance_killed(desk, sweep_id, line)
        advance(desk, sweep_id)
        members = desk.client.groups.sweep_members(sweep_id)
        assert queued(desk) == members, f"killed at line {line}"
        for job_id in members:
            rundir = desk.client.rundir(job_id)
            assert rundir.read_spec()["sweep"] == sweep_id
            assert labels.read(rundir).tags == (sweep_id,)
            assert (rundir.path / "source" / "source.json").is_file()
        advance(desk, sweep_id)
        assert queued(desk) == members
        remove(desk, sweep_id)
    assert not [path for path in desk.home.runs.iterdir() if path.name.startswith("grpo-")]


@pytest.mark.slow
@pytest.mark.parametrize("points", POINTS)
def test_a_decision_killed_anywhere_is_made_once_and_the_best_continues_once(desk, points):
    lines = lines_of_advance(desk, complete := at_rung(desk))
    remove(desk, complete)
    for line in spread(lines, points):
        sweep_id = at_rung(desk)
        best = desk.client.groups.sweep_members(sweep_id)[1]
        advance_killed(desk, sweep_id, line)
        advance(desk, sweep_id)
        assert queued(desk) == [best], f"killed at line {line}"
        assert desk.client.rundir(best).read_spec()["stop_at"] is None
        folder = SweepFolder(desk.home, sweep_id)
        [decision] = folder.state().decisions
        assert (decision.step, decision.kept) == (3, [1])
        assert folder.is_active  # until the best one has ended
        remove(desk, sweep_id)


def at_rung(desk) -> str:
    """A sweep whose three jobs have stopped at its first rung."""
    sweep_id = planned(desk, **RATES, halving=3)
    advance(desk, sweep_id)
    for reward in (0.1, 0.3, 0.2):
        play_to(desk, 3, reward)
    return sweep_id


def remove(desk, sweep_id: str) -> None:
    desk.client.jobs.cancel(sweep_id)
    desk.client.jobs.remove(sweep_id)


def test_a_removal_killed_half_way_is_finished_by_the_next_one(desk):
    sweep_id = planned(desk, **RATES)
    advance(desk, sweep_id)
    desk.client.jobs.cancel(sweep_id)
    first, *others = desk.client.groups.sweep_members(sweep_id)
    desk.client.jobs.remove(first)
    assert desk.client.groups.sweep(sweep_id)["statuses"] == {"canceled": 2, "removed": 1}
    assert desk.client.jobs.remove(sweep_id) > 0
    assert desk.client.groups.sweeps() == []
    assert not any((desk.home.runs / job_id).exists() for job_id in others)
