"""Names of everything warmd keeps in Redis, and how it connects.

RQ owns `rq:*`; warmd's own keys start with `warmd:`. No key literal stands anywhere else.
"""

from __future__ import annotations

from typing import Any

import orjson
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

# What RQ takes for the function of warmd's jobs; a job that names another one is refused. Workers
# import nothing by it: the name is what homes of every version have in Redis.
JOB_FUNCTION = "warmd.daemon.horse.run_job"

# Hash of every worker that may hold a job: its name -> the queue it listens on.
WORKERS = "warmd:workers"

# The folder of run directories that belongs to the jobs of a server: JSON with its id and path.
RUNS = "warmd:runs"

# The name of a Redis' data, by which run directories tell it from others: see adoption.py.
IDENTITY = "warmd:id"

# Fields that warmd adds to RQ's hash of a job.
FIELD_EXECUTION = "warmd_execution"  # how many executions have begun
FIELD_KILLS = "warmd_kills"  # horses killed in a row without a step more
FIELD_STOP = "warmd_stop"  # "cancel" or "kill" while somebody asks for it
FIELD_PAUSE = "warmd_pause"  # "hold" or "release" from the asking until `unpause`
FIELD_DUE = "warmd_due"  # of a paused job that was scheduled: the time it was scheduled for
FIELD_SUSPECT = "warmd_suspect"  # a horse was killed that ran this job and others

# Indices of jobs: see jobindex.py.
FROM_CLI = "warmd:cli"
ANSWERS = "warmd:answers"
INDEXED = "warmd:indexed"  # the version of the indices, once what was there before is in them

# Channel that names a started job of which something was just asked. A hint: the hash has it.
STEER = "warmd:steer"


def events(job_id: str) -> str:
    """Stream of a job's events; entry `SEQ-0` holds event number SEQ."""
    return f"warmd:events:{job_id}"


def jobs(queue: str) -> str:
    """Sorted set of all jobs of a queue, by the time of their creation."""
    return f"warmd:jobs:{queue}"


def stopped(queue: str) -> str:
    """Set of a queue's stopped jobs."""
    return f"warmd:stopped:{queue}"


def taken(worker: str) -> str:
    """List of the jobs that a worker popped and has not begun."""
    return f"warmd:taken:{worker}"


def lease(worker: str) -> str:
    """Expires a few seconds after a worker's last sign of life."""
    return f"warmd:lease:{worker}"


def http_request(home: str, name: str) -> str:
    """The job that a home's gateway made for an Idempotency-Key (its hash), for a day."""
    return f"warmd:http:{home}:{name}"


def text(raw: Any) -> str:
    """Return an id or a name that came from Redis as bytes.

    Anybody may write there: bytes that are no text show as escapes, and so name nothing.
    """
    return bytes(raw).decode(errors="backslashreplace")


class Serializer:
    """RQ's serializer: JSON, never pickle, so that who writes to Redis cannot run code."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        return orjson.dumps(value)

    @staticmethod
    def loads(data: bytes) -> Any:
        return orjson.loads(data)


def connect(url: str, *, timeout_s: float = 5.0) -> redis.Redis:
    """Open a connection (lazily). `timeout_s` bounds connecting and every reply.

    redis-py repeats what failed up to ten times. Blocking commands need a timeout longer than they
    block.
    """
    return redis.Redis.from_url(
        url,
        socket_connect_timeout=timeout_s,
        socket_timeout=timeout_s,
        health_check_interval=0,
    )


def connect_once(url: str, *, timeout_s: float) -> redis.Redis:
    """The same for a loop that has more to do: what fails or times out is not repeated."""
    connection = connect(url, timeout_s=timeout_s)
    connection.set_retry(Retry(NoBackoff(), 0))
    return connection
