"""Redis on a machine whose clock is minutes ahead: times of jobs use its clock."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import redis
from machines import with_clock
from waiting import wait_until

from warmd.daemon.queue import keys
from warmd.daemon.queue.clocks import SharedClock
from warmd.daemon.queue.jobs import JobStore
from warmd.daemon.supervise.redis_server import find_binary

AHEAD_S = 7 * 60
WORKER = "train-0:abcd1234:1"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A Redis whose clock is seven minutes ahead."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        path = Path(folder) / "redis.sock"
        options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", folder]
        server = subprocess.Popen(
            [find_binary(None), *options],
            env={**os.environ, **with_clock("+7m")},
            stdout=subprocess.DEVNULL,
        )

        def answers() -> bool:
            with suppress(redis.RedisError), keys.connect_once(f"unix://{path}") as connection:
                return bool(connection.ping())
            return False

        wait_until(answers)
        yield f"unix://{path}"
        server.kill()
        server.wait()


def test_the_clock_of_redis_is_known_to_a_fraction_of_a_second(url: str):
    with keys.connect_once(url) as connection:
        clock = SharedClock(connection)
        assert clock.offset_s() == pytest.approx(AHEAD_S, abs=0.5)
        assert clock.now() == pytest.approx(time.time() + AHEAD_S, abs=0.5)


def test_a_slow_round_trip_does_not_disturb_the_clock(url: str):
    with keys.connect_once(url) as connection, keys.connect_once(url) as other:
        connection.ping()  # connected
        other.execute_command("CLIENT", "PAUSE", "400", "ALL")
        clock = SharedClock(connection)
        begun = time.monotonic()
        found = clock.offset_s()
        assert time.monotonic() - begun > 0.3  # the first round trip waited for the pause
        assert found == pytest.approx(AHEAD_S, abs=0.05)


def test_every_time_of_a_job_uses_the_clock_of_redis(url: str):
    with keys.connect_once(url) as connection:
        store = JobStore(connection)
        store.enqueue("infer-20261124-184200-x7f2", "infer")
        popped = connection.lmove(store.queue("infer").key, keys.taken(WORKER), "LEFT", "RIGHT")
        begun = store.begin(bytes(popped), "infer", WORKER)
        assert begun is not None
        assert store.finish(begun[0], begun[1].claim)
        job = store.fetch("infer-20261124-184200-x7f2")
        assert job is not None
        for moment in (job.created_at, job.enqueued_at, job.started_at, job.ended_at):
            assert moment is not None
            assert moment.timestamp() == pytest.approx(time.time() + AHEAD_S, abs=5)
        # Retention removes answers by the time of their end.
        (found,) = connection.zrange(keys.ANSWERS, 0, -1, withscores=True)
        assert found[1] == pytest.approx(time.time() + AHEAD_S, abs=5)
