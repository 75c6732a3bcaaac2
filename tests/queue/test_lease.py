"""A worker's lease: when its jobs are requeued while Redis hangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from waiting import wait_until
from workplaces import NAME, Workplace, seconds_until, workplace

from warmd.daemon.host.messages import StopJob
from warmd.daemon.queue import keys


@pytest.fixture
def place() -> Iterator[Workplace]:
    with workplace() as made:
        yield made


@pytest.mark.slow
def test_a_worker_whose_redis_hangs_still_receives_from_horses_and_stops_after_they_saved(
    place: Workplace,
):
    worker = place.worker(slots=1)
    job_id = place.submit()
    with place.zygote() as zygote:
        horse = zygote.fork()
        wait_until(lambda: place.status(job_id) == "started")
        place.suspend_redis()
        worker.terminate()
        assert seconds_until(lambda: horse.next_message() == StopJob(job_id, "drain")) < 2
        horse.end(job_id, "stopped", reason="drain")
        assert seconds_until(lambda: worker.poll() is not None) < 5
    assert worker.returncode == 0
    place.resume_redis()
    assert place.status(job_id) == "started"  # Redis could not be updated
    assert place.registry.requeue_orphans(NAME, "infer") == [job_id]
    assert place.status(job_id) == "queued"


@pytest.mark.slow
def test_a_worker_ends_its_jobs_before_its_lease_expires(place: Workplace):
    lease_s = 4.0
    place.worker(slots=1, is_shared=True, lease_s=lease_s)
    job_id = place.submit()
    with place.zygote() as zygote:
        horse = zygote.fork()
        wait_until(lambda: place.status(job_id) == "started")
        left_s = place.connection.pttl(keys.lease(NAME)) / 1000
        place.suspend_redis()
        assert seconds_until(lambda: not horse.is_alive()) < left_s
        horse.die()
        wait_until(lambda: place.events(job_id, "requeued"))
        place.resume_redis()
        again = zygote.fork()
        assert (again.job_id, again.request.execution) == (job_id, 2)
        reasons = [event["reason"] for event in place.events(job_id, "requeued")]
        assert reasons == ["the worker lost its connection to Redis"]
    assert "could not renew its lease" in place.home.log.read_text()


@pytest.mark.slow
def test_a_job_survives_an_embedded_redis_that_hangs_longer_than_the_lease(place: Workplace):
    lease_s = 2.0
    place.worker(slots=1, lease_s=lease_s)
    job_id = place.submit()
    with place.zygote() as zygote:
        horse = zygote.fork()
        wait_until(lambda: place.status(job_id) == "started")
        place.suspend_redis()
        with pytest.raises(AssertionError):
            wait_until(lambda: not horse.is_alive(), timeout_s=2 * lease_s)
        place.resume_redis()
        wait_until(lambda: place.registry.has_lease(NAME))
        horse.end(job_id, "finished")
        wait_until(lambda: place.status(job_id) == "finished")
    assert place.client.jobs.get(job_id)["execution"] == 1
    other = place.submit()
    wait_until(lambda: place.status(other) == "started")


@pytest.mark.nightly(
    part="daemons", catches="a worker whose lease expires while it is busy, or outlives it"
)
def test_the_lease_is_renewed_while_the_worker_is_busy(place: Workplace):
    worker = place.worker(lease_s=2.0)
    with pytest.raises(AssertionError):
        wait_until(lambda: not place.registry.has_lease(NAME), timeout_s=3.0)
    worker.terminate()
    worker.wait(10)
    wait_until(lambda: not place.registry.has_lease(NAME), timeout_s=3.0)
    assert place.registry.workers() == {}
