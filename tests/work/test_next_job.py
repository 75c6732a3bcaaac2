"""Jobs that wait in one queue: each begins as soon as the previous one has ended."""

from __future__ import annotations

import pytest
from daemons import Daemon

from warmd.daemon.work.horses import TICK_S


@pytest.mark.slow
def test_a_waiting_job_begins_before_the_next_periodic_check(shared_daemon: Daemon):
    jobs = [shared_daemon.submit(samples=1, save_every=100) for _ in range(8)]
    for job_id in jobs:
        assert shared_daemon.wait(job_id)["status"] == "finished"
    times = [shared_daemon.client.jobs.get(job_id) for job_id in jobs]
    ends = [job["ended_at"] for job in times[:-1]]
    begins = [job["started_at"] for job in times[1:]]
    # The least, because the machine may be busy: a worker that sleeps does so each time.
    assert min(begin - end for begin, end in zip(begins, ends, strict=True)) < TICK_S / 2
