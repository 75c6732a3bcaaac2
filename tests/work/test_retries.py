"""What uses a retry: errors, time limits and stalls; each time after a longer pause."""

from __future__ import annotations

import pytest
from daemons import Daemon
from disturbing import STEPS, steps
from waiting import wait_until


@pytest.mark.slow
def test_a_job_at_its_time_limit_is_tried_again_from_its_checkpoint(sturdy: Daemon):
    (sturdy.folder / "gate").touch()
    job_id = sturdy.submit("behaviours:gated", save_every=1, retries=1, timeout_s=2.0)
    wait_until((sturdy.folder / "requested").exists)
    (sturdy.folder / "gate").unlink()
    ended = sturdy.wait(job_id)
    assert (ended["status"], ended["execution"]) == ("finished", 2)
    assert steps(sturdy, job_id) == STEPS
    [retried] = [e for e in sturdy.events(job_id, "requeued") if "retries_left" in e]
    assert retried["reason"] == (
        "took longer than its time limit of 2 s, will be tried again in 1 s"
    )


@pytest.mark.slow
def test_a_job_that_stalls_is_tried_again(sturdy: Daemon):
    (sturdy.folder / "gate").touch()
    job_id = sturdy.submit("behaviours:hangs", samples=10, save_every=5, on_stall="stop", retries=1)
    wait_until(lambda: sturdy.events(job_id, "stall"))
    (sturdy.folder / "gate").unlink()
    ended = sturdy.wait(job_id)
    assert (ended["status"], ended["execution"], ended["retries_left"]) == ("finished", 2, 0)


@pytest.mark.slow
def test_a_job_that_waits_for_its_retry_can_be_canceled(sturdy: Daemon):
    (sturdy.folder / "broken").touch()
    job_id = sturdy.submit("behaviours:raises", retries=9)
    wait_until(lambda: sturdy.client.jobs.get(job_id)["retries_left"] == 6)
    job = wait_until(lambda: sturdy.wait(job_id, "scheduled"))
    assert job["scheduled_at"] is not None
    sturdy.client.jobs.cancel(job_id)
    assert sturdy.wait(job_id)["status"] == "canceled"
