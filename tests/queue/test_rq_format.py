"""RQ's records, also those that another version of RQ has written, and the prefix of its keys."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from rq import Queue, Worker
from rq.job import Job
from rq_versions import IS_3
from workplaces import Workplace, workplace

from warmd.daemon.lifecycle.view import JobFilter
from warmd.daemon.queue import key_prefix, keys, listing, rq_format
from warmd.daemon.queue.due import DueJobs
from warmd.daemon.queue.rq_workers import WorkerState
from warmd.jobs.errors import Conflict


@pytest.fixture
def place() -> Iterator[Workplace]:
    with workplace() as made:
        yield made


def begin(place: Workplace, job_id: str) -> Any:
    """Take a job from the queue as a worker does, and start it."""
    popped: Any = place.connection.lmove("rq:queue:infer", keys.taken("w:a:b"), "LEFT", "RIGHT")
    assert popped == job_id.encode()
    begun = place.store.begin(popped, "infer", "w:a:b")
    assert begun is not None
    return begun


def make_ready(place: Workplace, job_id: str) -> None:
    """Change a deferred job as RQ 3 does when its dependencies have finished."""
    place.connection.zrem("rq:deferred:infer", job_id)
    place.connection.hset(f"rq:job:{job_id}", "status", "ready_to_enqueue")
    place.connection.zadd("rq:ready:infer", {job_id: 1})


def make_rate_limited(place: Workplace, job_id: str) -> None:
    """Change a queued job to what RQ 3 makes of one with a rate limit."""
    place.connection.lrem("rq:queue:infer", 1, job_id)
    place.connection.hset(f"rq:job:{job_id}", "status", "rate_limited")
    place.connection.sadd("rq:rl-keys", "two at once")
    place.connection.zadd("rq:rl:two at once:rate_limited", {job_id: 1})


def test_a_job_that_rq_3_made_ready_is_listed_and_then_queued(place: Workplace):
    first = place.submit()
    waiting = place.submit(after=first)
    job, started = begin(place, first)
    assert place.store.fail(job, started.claim, "e")
    place.connection.hset(f"rq:job:{first}", "status", "finished")
    make_ready(place, waiting)
    assert place.status(waiting) == "deferred"
    assert [job["id"] for job in place.client.jobs.all(JobFilter(statuses=("deferred",)))] == [
        waiting
    ]
    assert listing.counts(place.connection, "infer")["deferred"] == 1
    assert waiting in listing.every_id(place.connection)
    DueJobs(place.store).enqueue()
    assert place.status(waiting) == "queued"
    assert not place.connection.exists("rq:ready:infer")
    assert place.connection.lrange("rq:queue:infer", 0, -1) == [waiting.encode()]


@pytest.mark.parametrize("change", [make_ready, make_rate_limited])
def test_a_job_with_a_status_of_rq_3_can_be_paused_continued_and_canceled(
    place: Workplace, change: Any
):
    job_id = place.submit()
    for what in (place.client.jobs.pause, place.client.jobs.cancel):
        place.connection.lrem("rq:queue:infer", 0, job_id)
        change(place, job_id)
        assert place.status(job_id) == "deferred"
        what(job_id)
        if what == place.client.jobs.pause:
            assert place.client.jobs.get(job_id)["paused"]
            assert place.client.jobs.unpause(job_id) == "queued"
    assert place.status(job_id) == "canceled"
    assert not place.connection.exists("rq:ready:infer")


def test_a_rate_limited_job_is_listed_and_counted(place: Workplace):
    job_id = place.submit()
    make_rate_limited(place, job_id)
    assert [job["id"] for job in place.client.jobs.all(JobFilter(statuses=("deferred",)))] == [
        job_id
    ]
    assert listing.counts(place.connection, "infer")["deferred"] == 1
    assert listing.counts(place.connection, "train")["deferred"] == 0
    assert listing.every_id(place.connection) == [job_id]


def test_dependents_are_queued_by_the_transaction_that_finishes_the_job(place: Workplace):
    """Also jobs of other programs in their own queues; no scan is needed for any of them."""
    first, second = place.submit(), place.submit()
    waiting = place.submit(after=first)
    canceled = place.submit(after=first)
    place.client.jobs.cancel(canceled)
    theirs = Queue("theirs", connection=place.connection)
    foreign = theirs.enqueue("os.getpid", depends_on=first)
    both = theirs.enqueue("os.getpid", depends_on=[first, second])
    job, started = begin(place, first)
    assert place.store.finish(job, started.claim)
    assert (place.status(first), place.status(waiting)) == ("finished", "queued")
    assert place.status(canceled) == "canceled"
    assert foreign.get_status() == "queued"
    assert theirs.get_job_ids() == [foreign.id]
    assert both.get_status() == "deferred"
    assert not place.connection.exists("rq:ready:infer", "rq:ready:theirs")
    job, started = begin(place, second)
    assert place.store.finish(job, started.claim)
    assert theirs.get_job_ids() == [foreign.id, both.id]
    assert not place.connection.exists(Job.dependents_key_for(first))


@pytest.mark.slow
def test_executions_leave_nothing_behind_whichever_version_of_rq_began_them(place: Workplace):
    job_id = place.submit()
    begin(place, job_id)
    key = rq_format.worker_executions_key("w:a:b")
    assert place.connection.scard(key) == 1
    assert place.registry.reclaim("w:a:b", "infer") == [job_id]
    assert not place.connection.exists(key)
    job, started = begin(place, job_id)
    place.connection.delete(key)  # as with RQ 2, which does not have it
    assert place.store.finish(job, started.claim)
    assert place.connection.keys("rq:execution*") == []


def run(place: Workplace, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command of the client."""
    return subprocess.run(
        [sys.executable, "-m", "warmd.cli", *arguments],
        env={**os.environ, "WARMD_HOME": str(place.home.path), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_client_with_another_prefix_is_told_so_whatever_it_asks(place: Workplace):
    job_id = place.submit()
    place.connection.set(keys.RQ_PREFIX, "team")
    client = type(place.client)(place.config)
    for ask in (
        client.jobs.all,
        client.jobs.queues,
        client.jobs.pending,
        lambda: client.jobs.get(job_id),
        lambda: client.jobs.cancel(job_id),
        lambda: list(client.jobs.follow(job_id)),
        lambda: client.jobs.remove(job_id),
    ):
        with pytest.raises(Conflict, match=r"RQ_KEY_PREFIX: must be team, .* got rq: "):
            ask()
    client.close()
    done = run(place, "jobs", "--all")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_redis_of_an_earlier_version_has_the_default_prefix(place: Workplace):
    place.submit()
    place.connection.delete(keys.RQ_PREFIX)
    place.connection.set(keys.IDENTITY, "0")
    assert [job["status"] for job in place.client.jobs.all()] == ["queued"]


@pytest.mark.slow
@pytest.mark.skipif(not IS_3, reason="RQ 2 has no RQ_KEY_PREFIX")
def test_a_client_that_sets_rq_key_prefix_never_sees_an_empty_queue(place: Workplace):
    key_prefix.claim(place.connection)  # as each daemon does when it starts
    place.submit()
    for arguments in (["jobs", "--all"], ["queue"], ["run", "a"]):
        done = run(place, *arguments, RQ_KEY_PREFIX="team")
        assert done.returncode == 2, arguments
        assert "RQ_KEY_PREFIX: must be rq, " in done.stderr
        assert "got team: unset it" in done.stderr
        assert done.stderr.count("\n") == 1
    done = run(place, "jobs", RQ_KEY_PREFIX="a b")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "RQ_KEY_PREFIX: must be letters, digits and any of _.:-{}, got 'a b'" in done.stderr


@pytest.mark.slow
def test_an_idle_worker_has_no_current_job_in_rq(place: Workplace):
    for state in (WorkerState(job=place.submit()), WorkerState()):
        place.registry.register("w:a:b", "infer", lease_s=15.0, state=state)
    (worker,) = Worker.all(connection=place.connection)
    assert (worker.get_state(), worker.get_current_job()) == ("idle", None)
