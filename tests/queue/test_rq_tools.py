"""RQ's own tools on the Redis of a daemon: they show the correct state and do no harm."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from waiting import wait_until
from workplaces import NAME, Workplace, workplace

from warmd.daemon.queue.due import DueJobs


@pytest.fixture
def place() -> Iterator[Workplace]:
    with workplace() as made:
        yield made


def rq(place: Workplace, *arguments: str) -> str:
    """Type a command of RQ's command line."""
    program = Path(sys.executable).with_name("rq")
    done = subprocess.run(
        [program, *arguments, "--url", place.redis.url],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def has_ended(place: Workplace, job_id: str) -> bool:
    return place.status(job_id) in ("finished", "failed")


@pytest.mark.slow
def test_rq_info_shows_workers_with_their_jobs(place: Workplace):
    worker = place.worker(slots=1, lease_s=1.0)
    assert "1 workers, " in rq(place, "info")
    with place.zygote() as zygote:
        for outcome in ("finished", "failed"):
            job_id = place.submit()
            horse = zygote.fork()
            wait_until(lambda: "busy infer" in rq(place, "info", "--raw"))
            horse.end(job_id, outcome, error="e")
            horse.die()
            wait_until(partial(has_ended, place, job_id))
        line = "idle infer. jobs: 1 finished, 1 failed"
        wait_until(lambda: line in rq(place, "info", "--raw"))
    assert f"worker {NAME} (" in rq(place, "info", "--raw")
    worker.terminate()
    worker.wait(10)
    assert "0 workers, " in rq(place, "info")


@pytest.mark.slow
def test_rq_info_no_longer_shows_a_killed_worker(place: Workplace):
    worker = place.worker(lease_s=0.5)
    worker.kill()
    worker.wait()
    wait_until(lambda: "0 workers, " in rq(place, "info"), timeout_s=10)


@pytest.mark.slow
def test_suspended_workers_take_no_jobs_until_they_are_resumed(place: Workplace):
    place.worker(slots=1, lease_s=1.0)
    rq(place, "suspend")
    wait_until(lambda: "suspended infer" in rq(place, "info", "--raw"))
    job_id = place.submit()
    with pytest.raises(AssertionError):
        wait_until(lambda: place.status(job_id) != "queued", timeout_s=1.5)
    assert "workers suspended by `rq suspend`" in place.home.log.read_text()
    rq(place, "resume")
    wait_until(lambda: place.status(job_id) == "started")


@pytest.mark.slow
@pytest.mark.parametrize("serializer", ["pickle", "json"])
def test_a_stray_rq_worker_cannot_fail_a_job(place: Workplace, serializer: str):
    job_id = place.submit(retries=2)
    # Of a version of RQ that cannot read the job, or the function of which is not there.
    options = ["--serializer", "rq.serializers.JSONSerializer"] if serializer == "json" else []
    rq(place, "worker", "infer", "--burst", *options)
    job = place.client.jobs.get(job_id)
    assert (job["status"], job["retries_left"], job["execution"]) == ("scheduled", 2, 0)
    due = DueJobs(place.store)

    def is_back() -> bool:
        due.enqueue()
        return place.status(job_id) in ("queued", "started")

    wait_until(is_back, timeout_s=10)
    place.worker(slots=1)
    with place.zygote() as zygote:
        horse = zygote.fork()
        assert (horse.job_id, horse.request.execution) == (job_id, 1)
        horse.end(job_id, "failed", error="e")
        horse.die()
        wait_until(lambda: place.status(job_id) == "scheduled")
        wait_until(is_back, timeout_s=10)
        again = zygote.fork()  # its own retries are all there
        assert again.request.execution == 2
