"""Checks whether a Redis can hold jobs safely: version, rights, memory policy and persistence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from ...configs.queues import QUEUES
from . import others, rights

_OLDEST = (6, 2)
_NO_EVICTION = "noeviction"
_NUM_NAMED = 6  # missing rights in a message


@dataclass(frozen=True)
class RedisHealth:
    """What was found; `fault` makes it unusable, a warning may lose jobs."""

    version: str
    fault: str | None
    warnings: tuple[str, ...]


def check(connection: redis.Redis) -> RedisHealth:
    """Examine a Redis. Raises RedisError. Settings that it does not report are not examined."""
    info: Any = connection.info()
    version = str(info["redis_version"])
    fault = None
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        fault = f"is version {version}: warmd needs 6.2 or later"
    policy = info.get("maxmemory_policy", _NO_EVICTION)
    warnings = []
    if policy != _NO_EVICTION:
        problem = f"maxmemory-policy is {policy}: when memory is full, jobs would be deleted; "
        problem += f"run CONFIG SET maxmemory-policy {_NO_EVICTION}"
        if info.get("maxmemory"):
            fault = fault or problem
        else:
            warnings.append(problem)
    if not info.get("aof_enabled"):
        snapshots = _setting(connection, "save")
        if snapshots == "":
            problem = "it keeps nothing on disk: a restart loses the queue"
        else:
            problem = "it writes snapshots only: a crash loses the latest changes of jobs"
        warnings.append(f"{problem}; run CONFIG SET appendonly yes")
    if info.get("role") == "slave":
        fault = fault or "is a replica: use the address of the primary"
    if fault is None and (refused := rights.missing(connection)):
        named = ", ".join(refused[:_NUM_NAMED])
        more = f" and {len(refused) - _NUM_NAMED} more" if len(refused) > _NUM_NAMED else ""
        fault = f"refuses its user {named}{more}: docs/operations.md has the rights that it needs"
    if fault is None:
        for queue, num in others.count(connection, QUEUES).items():
            problem = f"queue {queue} has {num} jobs of another application: they are left there"
            warnings.append(f"{problem}; use another database for it (redis://HOST:PORT/DB)")
    return RedisHealth(version, fault, tuple(warnings))


def _setting(connection: redis.Redis, name: str) -> str | None:
    try:
        found: Any = connection.config_get(name)
    except redis.ResponseError:  # providers forbid it
        return None
    text: str | None = found.get(name)
    return text
