"""A worker whose connection to Redis breaks at a bad moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from waiting import wait_until
from workplaces import NAME, Workplace, workplace

from warmd.configs.config import WorkerConfig
from warmd.daemon.queue import adoption, keys
from warmd.daemon.queue.jobs import JobStore
from warmd.daemon.work.preparation import prepare


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
    adoption.take_over(place.connection, place.client.rundir(job_id))  # Redis is asked whose it is
    pop(place, job_id)
    begun = place.store.begin(job_id.encode(), "infer", NAME)
    assert begun is not None
    nowhere = JobStore(keys.connect_once("redis://127.0.0.1:1/0"))
    config = WorkerConfig(name="infer-0", queue="infer")
    with pytest.raises(redis.ConnectionError):
        prepare(nowhere, place.home.runs, NAME, config, *begun, is_shared=False)
    # The worker finds, when Redis is back, that it holds a job that it does not run.
    assert place.registry.reclaim(NAME, "infer") == [job_id]


@pytest.mark.slow
def test_a_worker_without_a_lease_takes_no_jobs(place: Workplace):
    with place.zygote() as zygote:
        place.worker(slots=1, is_shared=True, lease_s=3.0)
        place.connection.delete(keys.WORKERS)
        place.connection.set(keys.WORKERS, "renewals fail")
        time.sleep(3.0)  # the lease runs out
        job_id = place.submit()
        time.sleep(2.0)
        assert place.status(job_id) == "queued"
        place.connection.delete(keys.WORKERS)
        assert zygote.fork().request.execution <= 2  # what it waited for before may have begun
