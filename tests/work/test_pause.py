"""Pausing, in memory or on disk: a paused job continues only by `unpause`."""

from __future__ import annotations

import time
from datetime import datetime, timedelta
from typing import Any

import behaviours
import pytest
from daemons import Daemon
from waiting import wait_until

from warmd.daemon.queue import keys
from warmd.jobs.errors import Conflict


@pytest.fixture
def daemon(sturdy: Daemon) -> Daemon:
    """Some of these kill parts of it, and it comes back."""
    return sturdy


def hold_at_gate(daemon: Daemon, **options: Any) -> str:
    """Make a job run and wait in the middle of its third step until `gate` is removed."""
    for name in ("calls", "requested"):
        (daemon.folder / name).unlink(missing_ok=True)
    (daemon.folder / "gate").touch()
    job_id = daemon.submit("behaviours:gated", **options)
    wait_until(lambda: behaviours.steps_seen(daemon.folder) == 3)
    return job_id


def open_gate(daemon: Daemon) -> None:
    """Let that step end, once its process has received the request."""
    wait_until((daemon.folder / "requested").exists)
    (daemon.folder / "gate").unlink()


def pause(daemon: Daemon, **options: Any) -> str:
    """Make a job run, and hold it after its third step."""
    job_id = hold_at_gate(daemon, **options)
    assert daemon.client.jobs.pause(job_id) == "pausing"
    open_gate(daemon)
    wait_until(lambda: daemon.events(job_id, "paused"))
    return job_id


def steps(daemon: Daemon, job_id: str) -> list[int]:
    return [event["step"] for event in daemon.events(job_id, "step")]


def test_a_held_job_stays_in_memory_and_continues_at_once(daemon: Daemon):
    job_id = pause(daemon)
    job = daemon.client.jobs.get(job_id)
    assert (job["status"], job["paused"], job["step"]) == ("started", True, 3)
    with pytest.raises(Conflict, match="paused already"):
        daemon.client.jobs.pause(job_id)
    assert daemon.client.jobs.unpause(job_id) == "continuing"
    job = daemon.wait(job_id)
    assert (job["status"], job["paused"], job["execution"]) == ("finished", False, 1)
    assert steps(daemon, job_id) == [1, 2, 3, 4, 5, 6]


@pytest.mark.slow
def test_time_limit_does_not_run_while_a_job_is_held(daemon: Daemon):
    job_id = pause(daemon, timeout_s=3)
    begun = daemon.events(job_id, "started")[0]["time"]
    wait_until(lambda: time.time() > begun + 4)
    daemon.client.jobs.unpause(job_id)
    assert daemon.wait(job_id)["status"] == "finished"


@pytest.mark.slow
def test_a_released_job_saves_and_ends_until_it_is_unpaused(daemon: Daemon):
    job_id = hold_at_gate(daemon)
    assert daemon.client.jobs.pause(job_id, release=True) == "pausing"
    open_gate(daemon)
    job = daemon.wait(job_id, "scheduled")
    assert (job["paused"], job["scheduled_at"], job["step"]) == (True, None, 3)
    assert daemon.status()["workers"][0]["state"] == "idle"
    daemon.stop()
    daemon.start()
    after = daemon.submit()
    assert daemon.wait(after)["status"] == "finished"
    assert daemon.client.jobs.get(job_id)["paused"]
    assert daemon.client.jobs.unpause(job_id) == "queued"
    job = daemon.wait(job_id)
    assert (job["status"], job["execution"]) == ("finished", 2)
    assert steps(daemon, job_id) == [1, 2, 3, 4, 5, 6]
    assert daemon.events(job_id, "begin")[1]["resumed_from"] == 3


@pytest.mark.parametrize(
    "victim",
    [
        "horse",
        pytest.param("worker", marks=pytest.mark.slow),
        pytest.param(
            "stop",
            marks=pytest.mark.nightly(
                part="daemons", catches="a paused job that continues after a stop of the daemon"
            ),
        ),
        pytest.param(
            "everything",
            marks=pytest.mark.nightly(
                part="storms", catches="a paused job that continues after a crash of the daemon"
            ),
        ),
    ],
)
def test_held_job_whose_process_ends_stays_paused(daemon: Daemon, victim: str):
    job_id = pause(daemon)
    if victim == "stop":
        daemon.stop()
        daemon.start()
    elif victim == "everything":
        daemon.kill_everything()
        daemon.start()
    else:
        daemon.kill(victim)
    job = daemon.wait(job_id, "scheduled")
    assert (job["paused"], job["step"]) == (True, 3)
    assert daemon.wait(daemon.submit())["status"] == "finished"
    assert daemon.client.jobs.unpause(job_id) == "queued"
    job = daemon.wait(job_id)
    assert (job["status"], job["execution"]) == ("finished", 2)
    assert steps(daemon, job_id) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("how", ["cancel", "kill"])
def test_a_held_job_can_be_canceled_and_killed(daemon: Daemon, how: str):
    job_id = pause(daemon)
    getattr(daemon.client.jobs, how)(job_id)
    job = daemon.wait(job_id)
    assert (job["status"], job["paused"]) == ("stopped", False)
    with pytest.raises(Conflict, match="not paused"):
        daemon.client.jobs.unpause(job_id)
    daemon.client.jobs.resume(job_id)
    assert daemon.wait(job_id)["status"] == "finished"


def test_held_job_can_be_released(daemon: Daemon):
    job_id = pause(daemon)
    assert daemon.client.jobs.pause(job_id, release=True) == "pausing"
    assert daemon.wait(job_id, "scheduled")["paused"]
    assert daemon.client.jobs.resume(job_id) == "queued"  # as good as unpause
    assert daemon.wait(job_id)["status"] == "finished"


def test_a_withdrawn_release_lets_the_job_continue(daemon: Daemon):
    job_id = hold_at_gate(daemon)
    daemon.client.jobs.pause(job_id, release=True)
    assert daemon.client.jobs.unpause(job_id) == "continuing"
    (daemon.folder / "gate").unlink()
    assert daemon.wait(job_id)["status"] == "finished"
    assert steps(daemon, job_id) == [1, 2, 3, 4, 5, 6]


def test_a_paused_waiting_job_leaves_its_queue_and_returns_to_the_front(daemon: Daemon):
    running = hold_at_gate(daemon)
    first, second = daemon.submit(), daemon.submit()
    assert daemon.client.jobs.pause(second) == "paused"
    assert daemon.client.jobs.get(second)["position"] is None
    assert daemon.client.jobs.unpause(second) == "queued"
    places = [daemon.client.jobs.get(job_id)["position"] for job_id in (second, first)]
    assert places == [1, 2]
    daemon.client.jobs.pause(first)
    assert daemon.client.jobs.cancel(first) == "canceled"
    assert not daemon.client.jobs.get(first)["paused"]
    (daemon.folder / "gate").unlink()
    assert [daemon.wait(job_id)["status"] for job_id in (running, second)] == ["finished"] * 2


@pytest.mark.slow
def test_a_paused_job_is_not_queued_when_its_dependency_ends(daemon: Daemon):
    running = hold_at_gate(daemon)
    behind, again = daemon.submit(after=running), daemon.submit(after=running)
    for job_id in (behind, again):
        assert daemon.client.jobs.pause(job_id) == "paused"
    assert daemon.client.jobs.unpause(again) == "deferred"
    (daemon.folder / "gate").unlink()
    assert daemon.wait(again)["status"] == "finished"
    assert daemon.client.jobs.get(behind)["paused"]
    assert daemon.client.jobs.unpause(behind) == "queued"
    assert daemon.wait(behind)["status"] == "finished"


def test_paused_job_keeps_the_time_it_was_scheduled_for(daemon: Daemon):
    due = datetime.now().astimezone() + timedelta(hours=1)
    job_id = daemon.submit(at=due)
    daemon.client.jobs.pause(job_id)
    assert daemon.client.jobs.get(job_id)["scheduled_at"] is None
    assert daemon.client.jobs.unpause(job_id) == "scheduled"
    assert daemon.client.jobs.get(job_id)["scheduled_at"] == due.timestamp()
    daemon.client.jobs.cancel(job_id)


def test_an_impossible_pause_is_refused(daemon: Daemon):
    job_id = daemon.submit()
    with pytest.raises(Conflict, match="not paused"):
        daemon.client.jobs.unpause(job_id)
    daemon.wait(job_id)
    with pytest.raises(Conflict, match="finished: nothing to pause"):
        daemon.client.jobs.pause(job_id)


def test_resuming_a_paused_job_with_changes_is_refused_with_advice(daemon: Daemon):
    job_id = pause(daemon)
    for _ in range(2):
        with pytest.raises(Conflict, match=r"is paused: .* to change steps, cancel it first"):
            daemon.client.jobs.resume(job_id, changes={"steps": 7})
        if daemon.client.jobs.get(job_id)["status"] == "started":
            daemon.client.jobs.pause(job_id, release=True)
            daemon.wait(job_id, "scheduled")
    daemon.client.jobs.cancel(job_id)
    assert daemon.client.jobs.resume(job_id, changes={"steps": 7}) == "queued"
    assert daemon.wait(job_id)["result"]["steps"] == 7


def test_nothing_of_a_pause_is_left_in_redis(daemon: Daemon):
    job_id = pause(daemon)
    daemon.client.jobs.unpause(job_id)
    daemon.wait(job_id)
    fields: Any = daemon.client.connection.hgetall(f"rq:job:{job_id}")
    assert not {keys.FIELD_PAUSE.encode(), keys.FIELD_DUE.encode()} & fields.keys()
