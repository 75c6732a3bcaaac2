"""The queue for users: order, waiting, times, retries, limits, and ways to stop a job."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon
from rq import Queue
from rq.job import Job
from waiting import wait_until

from warmd.daemon.lifecycle.view import JobFilter
from warmd.daemon.queue import health, keys
from warmd.jobs import spec_class
from warmd.jobs.errors import Conflict, NotFound, SpecError, Unavailable


@pytest.fixture(scope="module")
def shared(shared_daemon: Daemon) -> Daemon:
    """One daemon for all tests here: none of them kills its processes."""
    return shared_daemon


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The shared daemon with a clean folder for the reward functions' files."""
    (shared.folder / "calls").unlink(missing_ok=True)
    yield shared
    for name in ("gate", "broken"):
        (shared.folder / name).unlink(missing_ok=True)
    wait_until(
        lambda: not shared.client.jobs.all(JobFilter(statuses=("queued", "started"))), timeout_s=60
    )


def hold(daemon: Daemon, **options: Any) -> str:
    """Have a job run and wait at its third step until `gate` is removed."""
    (daemon.folder / "gate").touch()
    job_id = daemon.submit("behaviours:gated", **options)
    wait_until(lambda: len(daemon.events(job_id, "step")) == 2)
    return job_id


def started_at(daemon: Daemon, job_id: str) -> float:
    time: float = daemon.wait(job_id)["started_at"]
    return time


@pytest.mark.slow
def test_jobs_run_in_order_and_front_jumps_the_queue(daemon: Daemon):
    running = hold(daemon)
    first, second = daemon.submit(), daemon.submit()
    urgent = daemon.submit(front=True)
    places = {
        job["id"]: job["position"]
        for job in daemon.client.jobs.all(JobFilter(statuses=("queued",)))
    }
    assert places == {urgent: 1, first: 2, second: 3}
    (daemon.folder / "gate").unlink()
    starts = [started_at(daemon, job_id) for job_id in (running, urgent, first, second)]
    assert starts == sorted(starts)


def test_job_after_another_waits_for_it_to_finish(daemon: Daemon):
    running = hold(daemon)
    waiting = daemon.submit(after=running)
    job = daemon.client.jobs.get(waiting)
    assert (job["status"], job["after"]) == ("deferred", [running])
    (daemon.folder / "gate").unlink()
    assert daemon.wait(waiting)["status"] == "finished"


def test_a_job_whose_dependency_failed_waits_until_it_is_resumed(daemon: Daemon):
    (daemon.folder / "broken").touch()
    broken = daemon.submit("behaviours:raises")
    waiting = daemon.submit(after=broken)
    assert daemon.wait(broken)["status"] == "failed"
    assert daemon.client.jobs.get(waiting)["status"] == "deferred"
    (daemon.folder / "broken").unlink()
    daemon.client.jobs.resume(broken)
    assert daemon.wait(waiting)["status"] == "finished"


@pytest.mark.slow
def test_scheduled_job_starts_when_its_time_has_come(daemon: Daemon):
    due = datetime.now().astimezone() + timedelta(seconds=2)
    job_id = daemon.submit(at=due)
    assert daemon.client.jobs.get(job_id)["status"] == "scheduled"
    assert started_at(daemon, job_id) >= due.timestamp()


@pytest.mark.slow
def test_a_failing_job_is_retried_the_requested_number_of_times(daemon: Daemon):
    (daemon.folder / "broken").touch()
    job = daemon.wait(daemon.submit("behaviours:raises", retries=2))
    assert (job["status"], job["execution"]) == ("failed", 3)
    assert job["error"].endswith(": RuntimeError: the reward is broken")
    started = [event["time"] for event in daemon.events(job["id"], "started")]
    assert started[1] - started[0] >= 1.0
    assert started[2] - started[1] >= 2.0  # the pauses grow


def test_a_huge_error_message_is_truncated_in_events_and_redis(daemon: Daemon):
    job_id = daemon.submit("behaviours:rants")
    assert daemon.wait(job_id)["status"] == "failed"
    (event,) = daemon.events(job_id, "failed")
    assert event["traceback"] is None  # the error names the line of the reward; the log has more
    for text in (event["error"], daemon.client.jobs.get(job_id)["error"]):
        assert len(text) < 21_000
        assert " characters left out …] " in text
        assert text.strip().endswith("and so on")


@pytest.mark.slow
def test_time_limit_saves_stops_and_fails_the_job_with_the_reason(daemon: Daemon):
    (daemon.folder / "gate").touch()
    job_id = daemon.submit("behaviours:gated", timeout_s=1, save_every=100)
    started = wait_until(lambda: daemon.events(job_id, "started"))[0]["time"]
    wait_until(lambda: datetime.now().timestamp() > started + 1.5)
    (daemon.folder / "gate").unlink()
    job = daemon.wait(job_id)
    assert (job["status"], job["error"]) == ("failed", "took longer than its time limit of 1 s")
    assert daemon.events(job_id, "checkpoint")


@pytest.mark.slow
def test_canceling_a_running_job_saves_and_resume_continues_it(daemon: Daemon):
    job_id = hold(daemon, samples=40, save_every=100)
    assert daemon.client.jobs.cancel(job_id) == "stopping"
    (daemon.folder / "gate").unlink()
    job = daemon.wait(job_id)
    assert job["status"] == "stopped"
    assert 3 <= job["step"] < 40
    assert daemon.client.jobs.resume(job_id) == "queued"
    job = daemon.wait(job_id)
    assert (job["status"], job["step"]) == ("finished", 40)
    assert [event["step"] for event in daemon.events(job_id, "step")] == list(range(1, 41))


def test_canceling_a_waiting_job_removes_it_from_the_queue(daemon: Daemon):
    running = hold(daemon)
    waiting = daemon.submit()
    assert daemon.client.jobs.cancel(waiting) == "canceled"
    (daemon.folder / "gate").unlink()
    assert daemon.wait(running)["status"] == "finished"
    assert daemon.wait(waiting)["status"] == "canceled"
    assert daemon.events(waiting) == []
    assert daemon.client.jobs.resume(waiting) == "queued"
    assert daemon.wait(waiting)["status"] == "finished"


def test_killing_a_job_ends_it_at_once_and_it_can_be_resumed(daemon: Daemon):
    job_id = hold(daemon)
    assert daemon.client.jobs.kill(job_id) == "killing"
    job = daemon.wait(job_id, timeout_s=10)
    assert (job["status"], job["error"]) == ("stopped", "killed on request")
    (daemon.folder / "gate").unlink()
    daemon.client.jobs.resume(job_id)
    assert daemon.wait(job_id)["status"] == "finished"


def test_ended_job_cannot_be_canceled_again(daemon: Daemon):
    job_id = daemon.submit()
    daemon.wait(job_id)
    with pytest.raises(Conflict, match="finished already"):
        daemon.client.jobs.cancel(job_id)


def test_finished_job_is_extended_to_more_steps(daemon: Daemon):
    job_id = daemon.submit()
    assert daemon.wait(job_id)["result"]["steps"] == 6
    assert daemon.client.jobs.resume(job_id) == "finished"
    assert daemon.client.jobs.resume(job_id, changes={"steps": 9}) == "queued"
    job = daemon.wait(job_id)
    assert (job["status"], job["result"]["steps"]) == ("finished", 9)
    assert [event["step"] for event in daemon.events(job_id, "step")] == list(range(1, 10))


def test_follow_shows_every_event_from_the_first_to_the_end(daemon: Daemon):
    job_id = daemon.submit()
    seen = [event for event in daemon.client.jobs.follow(job_id) if event is not None]
    assert [event["seq"] for event in seen] == list(range(1, len(seen) + 1))
    assert seen[0]["type"] == "started"
    assert seen[-1]["type"] == "finished"
    assert seen == daemon.events(job_id)


def test_follow_reads_events_that_the_stream_has_lost_from_the_file(daemon: Daemon):
    job_id = daemon.submit()
    daemon.wait(job_id)
    daemon.client.connection.xtrim(keys.events(job_id), maxlen=2, approximate=False)
    seen = [event for event in daemon.client.jobs.follow(job_id) if event is not None]
    assert seen == daemon.events(job_id)
    daemon.client.connection.delete(keys.events(job_id))
    assert [event for event in daemon.client.jobs.follow(job_id) if event is not None] == seen


@pytest.mark.slow
def test_the_stream_of_an_ended_job_is_trimmed(daemon: Daemon):
    job_id = daemon.submit(samples=40, epochs=2)
    seen = [event for event in daemon.client.jobs.follow(job_id) if event is not None]
    assert len(seen) > 80
    wait_until(lambda: daemon.client.connection.xlen(keys.events(job_id)) <= 64)
    assert [event for event in daemon.client.jobs.follow(job_id) if event is not None] == seen
    job = daemon.client.jobs.get(job_id)
    assert (job["status"], job["step"], job["steps_total"]) == ("finished", 80, 80)


@pytest.mark.slow
def test_following_a_job_continues_after_redis_is_killed(daemon: Daemon):
    job_id = hold(daemon, samples=40)
    events = daemon.client.jobs.follow(job_id)
    seen = [event for _, event in zip(range(4), events, strict=False)]
    daemon.kill("server")
    (daemon.folder / "gate").unlink()
    seen += events
    numbers = [event["seq"] for event in seen if event is not None]
    assert numbers == list(range(1, len(daemon.events(job_id)) + 1))


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_pickle_in_redis_runs_no_code(daemon: Daemon, tmp_path: Path):
    fuse = tmp_path / "exploded"
    job_id = "grpo-20260101-000000-aaaa"
    job = Job.create("os.system", args=("true",), id=job_id, connection=daemon.client.connection)
    job.data = pickle.dumps(("os.system", None, (Bomb(fuse),), {}))
    Queue("train", connection=daemon.client.connection).enqueue_job(job)
    wait_until(lambda: daemon.client.store.fetch(job_id).get_status() == "failed")  # type: ignore[union-attr]
    assert not fuse.exists()
    assert daemon.wait(daemon.submit())["status"] == "finished"


def test_foreign_function_in_redis_is_refused(daemon: Daemon, tmp_path: Path):
    fuse = tmp_path / "exploded"
    job_id = "grpo-20260101-000000-bbbb"
    queue = daemon.client.store.queue("train")
    queue.enqueue("os.mkdir", str(fuse), job_id=job_id)
    wait_until(lambda: daemon.client.store.fetch(job_id).get_status() == "failed")  # type: ignore[union-attr]
    assert not fuse.exists()


def test_jobs_of_another_application_stay_in_their_queue(daemon: Daemon):
    queue = Queue("train", connection=daemon.client.connection)
    others = [queue.enqueue("builtins.print", text).id for text in ("a", "b")]
    soon = queue.enqueue_in(timedelta(0), "builtins.print", "later")
    behind = [daemon.submit() for _ in range(2)]
    for job_id in behind:
        assert daemon.wait(job_id)["status"] == "finished"
    assert queue.job_ids == others
    assert soon.get_status() == "scheduled"
    soon.delete()
    (warning,) = health.check(daemon.client.connection).warnings
    assert warning.startswith("queue train has 2 jobs of another application")
    # Its own worker runs them, and warmd takes its jobs at once again.
    program = Path(sys.executable).with_name("rq")
    arguments = ["worker", "--burst", "--url", daemon.home.redis_url, "train"]
    subprocess.run([program, *arguments], check=True, capture_output=True)
    for job_id in others:
        assert Job.fetch(job_id, connection=daemon.client.connection).get_status() == "finished"
    assert daemon.wait(daemon.submit())["status"] == "finished"
    assert daemon.home.log.read_text().count("a job of another application") == 1


@pytest.mark.parametrize("text", ["../../x", "grpo-2026/..", "a" * 500, "", "grpo\n", "GRPO*"])
def test_hostile_id_is_refused(daemon: Daemon, text: str):
    with pytest.raises((SpecError, NotFound)):
        daemon.client.find(text)


def test_a_job_is_found_by_a_prefix_of_its_id(daemon: Daemon):
    job_id = daemon.submit()
    daemon.wait(job_id)
    assert daemon.client.find(job_id[:-1]) == job_id
    assert daemon.client.find(None) == job_id
    assert daemon.client.find("-") == job_id
    with pytest.raises(NotFound):
        daemon.client.find("grpo-19990101")


def test_bad_spec_queues_nothing_and_leaves_no_files(daemon: Daemon):
    runs = sorted(daemon.home.runs.iterdir())
    wrong: list[dict[str, Any]] = [
        {"samples": 10_000},
        {"model": "nosuchmodel"},
        {"dataset": "/nonexistent.jsonl"},
        {"reward": "nosuch:function"},
    ]
    for options in wrong:
        with pytest.raises((SpecError, NotFound)):
            daemon.submit(**options)
    assert sorted(daemon.home.runs.iterdir()) == runs
    assert daemon.client.jobs.all(JobFilter(statuses=("queued", "started"))) == []


def test_without_redis_submit_shows_how_to_start_the_daemon(make_daemon: Any):
    daemon = make_daemon()
    daemon.home.create()
    with pytest.raises(Unavailable, match="warmd start"):
        daemon.submit()
    assert list(daemon.home.runs.iterdir()) == []


def test_unknown_kind_is_named():
    with pytest.raises(SpecError, match="one of grpo"):
        spec_class("nosuch")
