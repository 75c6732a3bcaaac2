"""The time that a job is said to have taken: that of all its executions."""

from __future__ import annotations

import pytest
from daemons import Daemon
from shell import warmd

from warmd.cli.commands.jobs import took_s


@pytest.mark.slow
def test_the_time_of_a_job_is_that_of_all_its_executions(shared_daemon: Daemon) -> None:
    job_id = shared_daemon.submit()
    first = shared_daemon.wait(job_id)
    assert first["earlier_s"] == 0
    assert warmd("resume", job_id, "--steps", "9", home=shared_daemon.home.path).code == 0
    second = shared_daemon.wait(job_id)
    assert second["execution"] == 2
    times = [one["time"] for one in shared_daemon.events(job_id) if one["execution"] == 1]
    assert second["earlier_s"] == pytest.approx(times[-1] - times[0], abs=0.01)
    latest = second["ended_at"] - second["started_at"]
    assert took_s(second, 0) == pytest.approx(second["earlier_s"] + latest)


@pytest.mark.parametrize(
    ("job", "took"),
    [
        ({"started_at": None}, None),
        ({"status": "started", "ended_at": None, "started_at": 10.0, "earlier_s": 5.0}, 25.0),
        ({"status": "queued", "ended_at": None, "started_at": 10.0, "earlier_s": 5.0}, 5.0),
        ({"status": "failed", "ended_at": 12.0, "started_at": 10.0, "earlier_s": 5.0}, 7.0),
    ],
)
def test_a_job_that_waits_again_takes_no_time(job: dict[str, object], took: float | None) -> None:
    assert took_s(job, now=30.0) == took
