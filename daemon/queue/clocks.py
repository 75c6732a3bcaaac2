"""Clocks: one for durations, and Redis' for times that other machines read.

The clocks of machines that share a Redis may be minutes apart. Times of jobs and their events are
therefore this machine's time plus an offset, which is measured once a minute.
"""

from __future__ import annotations

import time
from typing import Any

import redis

_MEASURE_S = 60.0  # between two measurements: the clock of a machine may be set at any time


def clock() -> float:
    """Seconds of a clock that runs during suspend (CLOCK_BOOTTIME), if the system has one."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class SharedClock:
    """Redis' clock, seen through one connection."""

    def __init__(self, connection: redis.Redis) -> None:
        self._connection = connection
        self.latest_offset_s = 0.0  # as it was measured last; needs no Redis
        self._measured_at = float("-inf")

    def offset_s(self) -> float:
        """How far Redis' clock is ahead of this machine's. Raises RedisError.

        0 if the difference is too small to be measured, as on the machine of Redis: then times
        are those of `time.time`.
        """
        if clock() - self._measured_at > _MEASURE_S:
            sent = time.time()
            found: Any = self._connection.time()
            received = time.time()
            ahead = found[0] + found[1] / 1e6 - (sent + received) / 2
            self.latest_offset_s = ahead if abs(ahead) > abs(received - sent) / 2 else 0.0
            self._measured_at = clock()
        return self.latest_offset_s

    def now(self) -> float:
        """Unix seconds. Raises RedisError."""
        return self.offset_s() + time.time()
