"""Jobs that hang in a real daemon are reported while they hang, and end if `on_stall` says so."""

from __future__ import annotations

from typing import Any

import pytest
from daemons import Daemon
from waiting import wait_until


def stall_of(daemon: Daemon, job: str) -> dict[str, Any]:
    [event] = wait_until(lambda: daemon.events(job, "stall"))
    found: dict[str, Any] = event
    return found


@pytest.mark.slow
def test_a_hanging_step_is_reported_with_its_stack_and_the_job_continues(sturdy):
    (sturdy.folder / "gate").touch()
    job = sturdy.submit("behaviours:hangs", samples=10, save_every=5)
    stall = stall_of(sturdy, job)
    assert (stall["activity"], stall["step"]) == ("step", 7)
    assert "behaviours.py" in stall["stack"].split(" < ")[0]
    assert "most recent call first" in sturdy.client.rundir(job).log.read_text()
    (sturdy.folder / "gate").unlink()
    assert sturdy.wait(job)["status"] == "finished"
    assert [event["step"] for event in sturdy.events(job, "step")] == list(range(1, 11))
    numbers = [event["seq"] for event in sturdy.events(job)]
    assert numbers == list(range(1, len(numbers) + 1))


@pytest.mark.slow
def test_a_stall_of_a_job_that_holds_the_gil_is_reported(sturdy):
    job = sturdy.submit("behaviours:hangs_alone", samples=10)
    stall = stall_of(sturdy, job)
    assert "in hangs_alone" not in stall["stack"]
    assert "hangs_alone" in stall["stack"]
    sturdy.client.jobs.kill(job)
    assert sturdy.wait(job)["status"] == "stopped"


@pytest.mark.slow
def test_a_stall_can_end_the_job_which_saves_and_fails(sturdy):
    (sturdy.folder / "gate").touch()
    job = sturdy.submit("behaviours:hangs", samples=10, save_every=5, on_stall="stop")
    stall_of(sturdy, job)
    (sturdy.folder / "gate").unlink()
    ended = sturdy.wait(job)
    assert ended["status"] == "failed"
    assert ended["error"].startswith("stalled: a step took more than ")
    assert sturdy.events(job, "checkpoint")[-1]["step"] == 8
    assert sturdy.events(job)[-1]["type"] == "failed"
