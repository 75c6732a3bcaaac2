"""Jobs and control requests as they arrive from Redis, for the worker's select loop.

A blocking command waits on its own connection, on which the worker selects together with its
horses: a job is started the moment it is queued.
"""

from __future__ import annotations

import time
from typing import Any

import redis

from . import keys
from .rq_format import queue_key
from .sockets import connect, socket_of

_POP_S = 0.5  # timeout of one BLMOVE
_LATE_S = 2.0  # a reply that is later than this means that Redis hangs


class Mailbox:
    """Two connections to Redis: one waits for jobs, the other for control requests.

    Each is opened by the first call that needs it. Every method may raise RedisError; after `close`
    the next call connects again. A job whose BLMOVE reply was lost is in the worker's list.
    """

    def __init__(self, connection: redis.Redis, queue: str, worker: str) -> None:
        self._connection = connection
        self._source, self._target = queue_key(queue), keys.taken(worker)
        self._jobs: Any = None
        self._control: Any = None
        self._is_waiting = False
        self._due = 0.0  # when the reply is expected

    def sockets(self) -> list[Any]:
        """The sockets to select on: readable when `job` or `has_control_request` has a result."""
        connections = (self._jobs, self._control.connection if self._control is not None else None)
        found = [socket_of(one) for one in connections if one is not None]
        return [one for one in found if one is not None]

    @property
    def is_waiting(self) -> bool:
        """Whether a job may arrive."""
        return self._is_waiting

    def wait_for_job(self) -> None:
        """Request the next job: Redis moves it to the worker's list as soon as there is one."""
        if self._is_waiting:
            return
        if self._jobs is None:
            self._jobs = connect(self._connection)
        self._jobs.send_command("BLMOVE", self._source, self._target, "LEFT", "RIGHT", _POP_S)
        self._is_waiting = True
        self._due = time.monotonic() + _POP_S

    def job(self) -> tuple[bool, bytes | None]:
        """Return whether the wait has ended, and the job that was popped (None: none was)."""
        if not self._is_waiting:
            return False, None
        if not self._jobs.can_read(0):
            if time.monotonic() > self._due + _LATE_S:
                raise redis.TimeoutError("no reply to BLMOVE")
            return False, None
        popped = self._jobs.read_response()
        self._is_waiting = False
        return True, popped

    def has_control_request(self) -> bool:
        """Whether a stop or pause of a started job, of any worker, was requested just now."""
        if self._control is None:
            self._control = self._connection.pubsub(ignore_subscribe_messages=True)
            self._control.subscribe(keys.CONTROL_CHANNEL)
        has_request = False
        while self._control.connection.can_read(0):
            has_request = self._control.get_message() is not None or has_request
        return has_request

    def close(self) -> None:
        """Disconnect; a job that is popped meanwhile stays in the worker's list."""
        if self._jobs is not None:
            self._jobs.disconnect()
        if self._control is not None:
            self._control.close()
        self._jobs = self._control = None
        self._is_waiting = False
