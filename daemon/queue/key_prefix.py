"""The prefix of RQ's keys, which all programs on a Redis must agree on.

RQ 3 reads it from the environment (RQ_KEY_PREFIX), earlier versions always use `rq`. A program with
another prefix would find an empty queue and put its jobs where no worker looks.
"""

from __future__ import annotations

from typing import Any

import redis

from ...jobs.errors import Conflict
from . import keys
from .rq_format import DEFAULT_PREFIX, PREFIX, VERSION


def claim(connection: redis.Redis) -> None:
    """Mark a Redis with this process's prefix; raise Conflict if its jobs have another one."""
    if _noted(connection) is None:
        connection.set(keys.RQ_PREFIX, PREFIX, nx=True)
    check(connection)


def check(connection: redis.Redis) -> None:
    """Raise Conflict if the jobs in a Redis have another prefix than this process's."""
    noted = _noted(connection)
    if noted is None or noted == PREFIX:
        return
    if VERSION.startswith("2."):
        advice = f"install RQ 3, as {VERSION} has no such setting"
    else:
        advice = "unset it" if noted == DEFAULT_PREFIX else f"set RQ_KEY_PREFIX={noted}"
    raise Conflict(
        f"RQ_KEY_PREFIX: must be {noted}, the prefix of the jobs in this Redis, got {PREFIX}: "
        f"{advice}, or use another Redis"
    )


def _noted(connection: redis.Redis) -> str | None:
    """The prefix of the jobs in a Redis; None if it has none of warmd's data."""
    raw: Any = connection.get(keys.RQ_PREFIX)
    if raw is None:
        # Versions without the mark had RQ 2.
        marks = (keys.INDEXED, keys.IDENTITY, keys.RUNS, keys.WORKERS)
        return DEFAULT_PREFIX if connection.exists(*marks) else None
    return keys.text(raw)
