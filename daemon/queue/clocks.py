"""Clocks: one for durations, and Redis' for times that other machines read.

The clocks of machines that share a Redis may be minutes apart. Times of jobs and their events are
therefore this machine's time plus an offset, which is measured once a minute.
"""

from __future__ import annotations

import time
from typing import Any

import redis

_ROUND_TRIPS = 5  # of a measurement: on a busy machine some take many times as long
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
            _, self.latest_offset_s = min(self._measure() for _ in range(_ROUND_TRIPS))
            self._measured_at = clock()
        return self.latest_offset_s

    def _measure(self) -> tuple[float, float]:
        """Return the duration of a round trip to Redis and the offset by it (Cristian's algorithm).

        The offset is off by half of the duration at most: the shortest round trip is the best one.
        """
        sent = time.time()
        found: Any = self._connection.time()
        received = time.time()
        round_trip_s = abs(received - sent)
        ahead = found[0] + found[1] / 1e6 - (sent + received) / 2
        return round_trip_s, ahead if abs(ahead) > round_trip_s / 2 else 0.0

    def now(self) -> float:
        """Unix seconds. Raises RedisError."""
        return self.offset_s() + time.time()
