"""Events that a power failure took from the file come back from Redis; what is lost is named."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from daemons import Daemon
from disturbing import STEPS, hold, let_go, steps
from shell import warmd

from warmd.daemon.queue import keys


def hold_and_end_all(daemon: Daemon, keep: int) -> tuple[str, int]:
    """Kill the daemon while a job is held, and keep this many of its events in the file.

    Returns the job and how many events it had.
    """
    job_id = hold(daemon)
    had = len(daemon.events(job_id))
    daemon.kill_everything()
    path = daemon.home.runs / job_id / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:keep]))
    let_go(daemon)
    return job_id, had


def hold_and_kill(daemon: Daemon) -> str:
    """Return a job that was killed at its third step."""
    job_id = hold(daemon)
    daemon.client.jobs.kill(job_id)
    daemon.wait(job_id)
    let_go(daemon)
    return job_id


def finish(daemon: Daemon, job_id: str) -> list[dict[str, Any]]:
    """Resume a job; return its events when it has finished."""
    daemon.client.jobs.resume(job_id)
    assert daemon.wait(job_id)["status"] == "finished"
    return daemon.events(job_id)


def messages(daemon: Daemon, job_id: str) -> list[str]:
    return [event["message"] for event in daemon.events(job_id, "warning")]


def check_all_agree(daemon: Daemon, job_id: str) -> None:
    events = daemon.events(job_id)
    assert daemon.streamed(job_id) == events
    assert warmd("tail", job_id, "--json", home=daemon.home.path).objects == events
    shown = orjson.loads(warmd("show", job_id, "--json", home=daemon.home.path).out)
    assert (shown["status"], shown["step"]) == ("finished", 6)


@pytest.mark.nightly(
    part="storms", catches="events that the file of a job does not get back from Redis"
)
@pytest.mark.parametrize("keep", [0, 2])
def test_the_file_gets_back_what_redis_has(sturdy: Daemon, keep: int):
    job_id, had = hold_and_end_all(sturdy, keep)
    assert had > keep
    sturdy.start()
    assert sturdy.wait(job_id)["status"] == "finished"
    assert steps(sturdy, job_id) == STEPS
    events = sturdy.events(job_id)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert not any("lost" in message for message in messages(sturdy, job_id))
    check_all_agree(sturdy, job_id)


@pytest.mark.slow
def test_steps_that_neither_has_are_named(sturdy: Daemon):
    job_id = hold_and_kill(sturdy)
    (sturdy.home.runs / job_id / "events.jsonl").write_bytes(b"")
    sturdy.client.connection.delete(keys.events(job_id))
    finish(sturdy, job_id)
    assert steps(sturdy, job_id) == STEPS[2:]
    found = messages(sturdy, job_id)
    assert any(message.startswith("events: steps 1 to 2 are lost") for message in found)
    job = sturdy.client.jobs.get(job_id)
    assert "are lost" in job["alert"]


@pytest.mark.slow
def test_a_stream_that_lacks_some_restores_the_others_and_says_how_many(sturdy: Daemon):
    job_id = hold_and_kill(sturdy)
    whole = sturdy.events(job_id)
    path = sturdy.home.runs / job_id / "events.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:1]))
    connection = sturdy.client.connection
    for event in whole[:3]:
        connection.xdel(keys.events(job_id), f"{event['seq']}-0")
    events = finish(sturdy, job_id)
    assert [event["seq"] for event in events[1:3]] == [4, 5]
    assert "events: 2 are lost in a power failure" in messages(sturdy, job_id)


@pytest.mark.slow
def test_a_stream_of_other_events_is_dropped_and_its_numbers_are_not_used_again(sturdy: Daemon):
    job_id = hold_and_kill(sturdy)
    path = sturdy.home.runs / job_id / "events.jsonl"
    last = sturdy.events(job_id)[-1]["seq"]
    lines = path.read_bytes().splitlines(keepends=True)
    other = orjson.loads(lines[1]) | {"time": 1.0}  # an earlier version continued the file
    path.write_bytes(lines[0] + orjson.dumps(other) + b"\n")
    events = finish(sturdy, job_id)
    assert events[1] == other
    assert events[2]["seq"] > last
    assert events[2]["message"] == "events: some are lost in a power failure"
    check_all_agree(sturdy, job_id)
