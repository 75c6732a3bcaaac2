"""Ctrl-C while a job is submitted: the job is queued completely, or nothing of it is left."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType
from typing import Any

import pytest
from desks import Desk

from warmd.jobs import spec_class

WATCHED = ("/daemon/", "/jobs/files/")


def submit(desk: Desk, at: int | None) -> tuple[str | None, int]:
    """Submit a job; SIGINT comes at a call of a function. Return its id, and the calls so far."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if any(part in frame.f_code.co_filename for part in WATCHED):
            count += 1
            if count == at:
                os.kill(os.getpid(), signal.SIGINT)

    spec = spec_class("grpo").parse({"model": desk.grpo[3], "samples": 4})
    sys.settrace(trace)
    try:
        return desk.client.jobs.submit(spec), count
    except KeyboardInterrupt:
        return None, count
    finally:
        sys.settrace(None)


# A lock that an interrupt has just prevented from being released ends with its file.
ALL = pytest.mark.nightly(
    part="storms", catches="a call of a submission at which an interrupt leaves a job behind"
)


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
@pytest.mark.parametrize(
    "points", [pytest.param(40, id="some"), pytest.param(2000, id="all", marks=ALL)]
)
def test_a_submission_interrupted_anywhere_leaves_nothing(desk: Desk, points: int):
    queued, calls = submit(desk, None)
    assert queued is not None
    assert calls > 100
    every = range(1, calls, max(1, calls // points))
    interrupted = 0
    for at in every:
        job_id, _ = submit(desk, at)
        if job_id is not None:  # it came after the end
            desk.client.jobs.cancel(job_id)
            desk.client.jobs.remove(job_id)
            continue
        interrupted += 1
        assert os.listdir(desk.home.runs) == [queued], at
        found: Any = desk.client.connection.lrange("rq:queue:train", 0, -1)
        assert found == [queued.encode()], at
        assert [job["id"] for job in desk.client.jobs.all()] == [queued], at
        jobs: Any = desk.client.connection.keys("rq:job:*")
        assert [key for key in jobs if queued.encode() not in key] == [], at
    assert interrupted > len(every) / 2
