"""The election of a leader: the daemon that does the common work of all that share a Redis.

The leader queues due jobs, requeues the jobs of dead workers and removes old answers. All of that
may happen twice, so a leader that hangs and comes back does no harm. Redis times the lease.
"""

from __future__ import annotations

import redis

from . import keys
from .clocks import clock

LEASE_S = 10.0
_RENEW_S = LEASE_S / 4

# Takes or renews the lease. KEYS: the lease; ARGV: the daemon, milliseconds.
_CLAIM = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""

# Releases it. KEYS: the lease; ARGV: the daemon.
_RESIGN = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class Election:
    """The candidacy of one daemon."""

    def __init__(self, connection: redis.Redis, candidate: str) -> None:
        self._connection = connection
        self._candidate = candidate
        self._claimed_at = float("-inf")  # by `clock`: start of the last claim
        self._is_leader = False

    def is_leader(self) -> bool:
        """Whether this daemon leads now; queries Redis a few times per lease. Raises RedisError."""
        now = clock()
        if now - self._claimed_at >= _RENEW_S:
            self._is_leader = False  # in case the claim fails
            claimed = self._connection.eval(
                _CLAIM, 1, keys.LEADER, self._candidate, str(int(LEASE_S * 1000))
            )
            self._claimed_at, self._is_leader = now, bool(claimed)
        return self._is_leader

    def was_leader(self) -> bool:
        """The latest answer of `is_leader`, for other threads; False once it may be outdated."""
        return self._is_leader and clock() - self._claimed_at < LEASE_S

    def resign(self) -> None:
        """Let another daemon lead at once. Raises RedisError."""
        self._is_leader = False
        self._connection.eval(_RESIGN, 1, keys.LEADER, self._candidate)


def leader(connection: redis.Redis) -> str | None:
    """The name of the daemon that leads now."""
    raw = connection.get(keys.LEADER)
    return None if raw is None else keys.text(raw)
