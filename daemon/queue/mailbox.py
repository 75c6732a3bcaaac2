"""What reaches a worker from the server while it does something else: jobs, and word of orders.

A blocking command waits on a connection of its own, which the worker watches beside its horses:
a job is taken up the moment it is queued, whatever else runs.
"""

from __future__ import annotations

import time
from typing import Any

import redis

from . import keys

_POP_S = 0.5  # how long one wait for a job lasts
_LATE_S = 2.0  # after which a wait that is not over shows a server that hangs


class Mailbox:
    """Two connections to the server: one that waits for jobs, one that hears of orders.

    Opened by the first call that needs one. Every method may raise RedisError; after `close` the
    next call begins anew. A job that was popped and never heard of is in the worker's list.
    """

    def __init__(self, connection: redis.Redis, queue: str, worker: str) -> None:
        self._connection = connection
        self._source, self._target = f"rq:queue:{queue}", keys.taken(worker)
        self._jobs: Any = None
        self._orders: Any = None
        self._is_waiting = False
        self._due = 0.0  # when the wait should be over

    def sockets(self) -> list[Any]:
        """What to watch: readable when `job` or `orders` has something to say."""
        lines = (self._jobs, self._orders.connection if self._orders is not None else None)
        return [line._sock for line in lines if line is not None and line._sock is not None]

    def wait_for_job(self) -> None:
        """Have the server move the next job to the worker's list, now or when there is one."""
        if self._is_waiting:
            return
        if self._jobs is None:
            pool: Any = self._connection.connection_pool
            self._jobs = pool.make_connection()
            self._jobs.connect()
        self._jobs.send_command("BLMOVE", self._source, self._target, "LEFT", "RIGHT", _POP_S)
        self._is_waiting = True
        self._due = time.monotonic() + _POP_S

    def job(self) -> tuple[bool, bytes | None]:
        """Whether a wait is over, and what was popped from the queue, None for nothing."""
        if not self._is_waiting:
            return False, None
        if not self._jobs.can_read(0):
            if time.monotonic() > self._due + _LATE_S:
                raise redis.TimeoutError("no reply to BLMOVE")
            return False, None
        popped = self._jobs.read_response()
        self._is_waiting = False
        return True, popped

    def orders(self) -> bool:
        """Whether somebody just asked something of a started job (of any worker's)."""
        if self._orders is None:
            self._orders = self._connection.pubsub(ignore_subscribe_messages=True)
            self._orders.subscribe(keys.STEER)
        heard = False
        while self._orders.connection.can_read(0):
            heard = self._orders.get_message() is not None or heard
        return heard

    def close(self) -> None:
        """Hang up; a job that is popped meanwhile stays in the worker's list."""
        if self._jobs is not None:
            self._jobs.disconnect()
        if self._orders is not None:
            self._orders.close()
        self._jobs = self._orders = None
        self._is_waiting = False
