"""A worker whose connection to Redis breaks at a bad moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from waiting import holds_for, wait_until
from workplaces import NAME, Workplace, workplace

from warmd.configs.config import WorkerConfig
from warmd.configs.labels import NODES
from warmd.daemon.host.messages import RunJob
from warmd.daemon.lifecycle import adopt
from warmd.daemon.queue import keys
from warmd.daemon.queue.gangs import Gangs
from warmd.daemon.queue.jobs import JobStore
from warmd.daemon.queue.stream import StreamWriter
from warmd.daemon.work.attempt import Attempt
from warmd.daemon.work.gangs import Gathering, LedJobs
from warmd.daemon.work.held import Leaving
from warmd.daemon.work.preparation import prepare
from warmd.daemon.work.taking import JobTaker

NOWHERE = "redis://127.0.0.1:1/0"


@pytest.fixture
def place() -> Iterator[Workplace]:
    with workplace() as made:
        yield made


def pop(place: Workplace, job_id: str) -> None:
    """Do what a BLMOVE of the worker does, whose connection was closed before it arrived."""
    queue = place.store.queue("infer").key
    popped: Any = place.connection.lmove(queue, keys.taken(NAME), "LEFT", "RIGHT")
    assert popped == job_id.encode()


@pytest.mark.slow
def test_a_job_that_arrives_late_goes_back_to_the_queue_of_a_busy_worker(place: Workplace):
    with place.zygote() as zygote:
        running = place.submit()
        place.worker(slots=1)
        horse = zygote.fork()
        assert horse.job_id == running
        late = place.submit()
        pop(place, late)
        queue = place.store.queue("infer").key
        wait_until(lambda: place.connection.lrange(queue, 0, -1) == [late.encode()], timeout_s=10)
        assert place.status(running) == "started"


def test_a_job_does_not_fail_when_redis_is_lost_between_its_begin_and_its_horse(place: Workplace):
    job_id = place.submit()
    rundir = place.client.rundir(job_id)
    adopt.take_over(place.connection, rundir)  # Redis is asked whose it is
    pop(place, job_id)
    begun = place.store.begin(job_id.encode(), "infer", NAME)
    assert begun is not None
    nowhere = JobStore(keys.connect_once(NOWHERE))
    config = WorkerConfig(name="infer-0", queue="infer")
    with pytest.raises(redis.ConnectionError):
        prepare(nowhere, place.home.runs, NAME, config, *begun, is_shared=False)
    attempt = Attempt(place.store, *begun, StreamWriter(place.connection))
    held = place.held(nowhere, config)
    JobTaker(held, Leaving(held, max_jobs=None), {}).prepare(attempt)
    assert attempt.settle is not None
    attempt.settle()  # when Redis is back
    assert place.status(job_id) == "queued"


def test_a_job_of_several_nodes_does_not_start_without_them_when_redis_is_lost(place: Workplace):
    job_id = place.submit()
    pop(place, job_id)
    begun = place.store.begin(job_id.encode(), "infer", NAME)
    assert begun is not None
    request = RunJob(job_id, NAME, "", 1, slots=1, threads=1, niceness=0, enqueued_at=None)
    attempt = Attempt(place.store, *begun, StreamWriter(place.connection))
    attempt.prepare(request)
    led = LedJobs(Gangs(keys.connect_once(NOWHERE)), "127.0.0.1", wait_s=1.0)
    gathering = Gathering(job_id.encode(), "token", {NODES: "2"}, deadline=0.0)
    with pytest.raises(redis.ConnectionError):
        led.lead(attempt, gathering)
    assert attempt.settle is not None
    attempt.settle()
    assert place.status(job_id) == "queued"


@pytest.mark.slow
def test_a_worker_without_a_lease_takes_no_jobs(place: Workplace):
    with place.zygote() as zygote:
        place.worker(slots=1, is_shared=True, lease_s=1.5)
        place.connection.delete(keys.WORKERS)
        place.connection.set(keys.WORKERS, "renewals fail")
        time.sleep(1.5)  # the lease runs out
        job_id = place.submit()
        holds_for(2.0, lambda: place.status(job_id) == "queued")
        place.connection.delete(keys.WORKERS)
        assert zygote.fork().request.execution <= 2  # what it waited for before may have begun
