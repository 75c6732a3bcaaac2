"""A daemon that must not lose a process, whatever a test does to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from daemons import Daemon
from disturbing import pids


@pytest.fixture
def battered(sturdy: Daemon) -> Iterator[Daemon]:
    """A daemon that outlives the test, without one of its processes being replaced."""
    before, said = pids(sturdy), sturdy.home.log.stat().st_size
    yield sturdy
    assert sturdy.wait(sturdy.submit(), timeout_s=20)["status"] == "finished"
    assert sturdy.client.jobs.all()
    assert [queue["queued"] for queue in sturdy.client.jobs.queues()] == [0, 0]
    assert pids(sturdy) == before
    assert b"iteration failed" not in sturdy.home.log.read_bytes()[said:]
