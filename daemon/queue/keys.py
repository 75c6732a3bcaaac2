"""Redis keys, fields and connections.

warmd's keys start with `warmd:`; RQ's are in `rq_format`. No other module contains a key literal.
"""

from __future__ import annotations

from typing import Any

import orjson
import redis
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.retry import Retry

from .clients import client

_RETRIES = 10  # of a failed command, in about 3 s: redis-py's default

# The function name in RQ's record of a job; jobs with another one are refused. It is never
# imported: homes of all versions have this name in Redis.
JOB_FUNCTION = "warmd.daemon.horse.run_job"

# Hash of all workers that may hold a job: name -> queue.
WORKERS = "warmd:workers"

# The folder of run directories of the jobs in this Redis: JSON with its id and path.
RUNS = "warmd:runs"

# The prefix of RQ's keys: see key_prefix.py.
RQ_PREFIX = "warmd:rq"

# A random id of the data in this Redis, to which run directories refer: see lifecycle/adopt.py.
IDENTITY = "warmd:id"

# Hash: node -> JSON record; sorted set: node -> its latest heartbeat in seconds of Redis' clock;
# hash: node -> when `nodes --drain` requested that it leaves. See nodes.py.
NODES = "warmd:nodes"
NODE_BEATS = "warmd:nodes:beats"
NODE_DRAINS = "warmd:nodes:drains"

# Hash of counters, for `/metrics`: see totals.py.
TOTALS = "warmd:totals"

# The daemon that is the leader: see election.py.
LEADER = "warmd:leader"

# The job for which a worker gathers nodes now; expires. See gangs.py.
GATHERING = "warmd:gathering"

# Fields that warmd adds to RQ's hash of a job.
FIELD_EXECUTION = "warmd_execution"  # number of executions so far
FIELD_BEGUN = "warmd_begun"  # start of its first execution in seconds of Redis' clock
FIELD_KILLS = "warmd_kills"  # horses killed in a row without progress
FIELD_STOP = "warmd_stop"  # "cancel" or "kill" while requested
FIELD_PAUSE = "warmd_pause"  # "hold" or "release", from the request until `unpause`
FIELD_PAUSED_AT = "warmd_paused_at"  # time of that request in unix seconds
FIELD_DUE = "warmd_due"  # scheduled time of a job that was paused before that
FIELD_NEEDS = "warmd_needs"  # labels that a node must have, as a line; see waiting.py
FIELD_RETRIES = "warmd_retries"  # retries left; RQ's own field is for stray RQ workers
FIELD_WAITS = "warmd_waits"  # what a running job waits for, as its machine lacks it
FIELD_RETRIED = "warmd_retried"  # how often it was tried again
FIELD_SUSPECT = "warmd_suspect"  # a horse was killed that ran this job and others

# Job indices: see job_index.py.
FROM_CLI = "warmd:cli"
ANSWERS = "warmd:answers"
INDEXED = "warmd:indexed"  # version of the indices, once they are complete
LISTED = "warmd:listed"  # hash: a folder of run directories -> its time of change when indexed

_EVENTS = "warmd:events:"

# Channel on which the id of a started job is published when a stop or pause is requested. The
# request itself is in the job's hash.
CONTROL_CHANNEL = "warmd:steer"


def events(job_id: str) -> str:
    """Stream of a job's events; entry `SEQ-0` is event SEQ."""
    return f"{_EVENTS}{job_id}"


def job_of_events(key: str) -> str:
    """The job whose stream has this key."""
    return key.removeprefix(_EVENTS)


def of_kind(kind: str) -> str:
    """Sorted set of the jobs of a kind, by time of creation."""
    return f"warmd:kind:{kind}"


def jobs(queue: str) -> str:
    """Sorted set of all jobs of a queue, by time of creation."""
    return f"warmd:jobs:{queue}"


def stopped(queue: str) -> str:
    """Set of a queue's stopped jobs."""
    return f"warmd:stopped:{queue}"


def taken(worker: str) -> str:
    """List of the jobs that were popped for a worker and are not started."""
    return f"warmd:taken:{worker}"


def needs(queue: str) -> str:
    """Set of the needs, each as a line, for which jobs of a queue are set aside."""
    return f"warmd:needs:{queue}"


def set_aside(queue: str, line: str) -> str:
    """Sorted set of the queued jobs with these needs that are set aside, by time of creation."""
    return f"warmd:needs:{queue}:{line}"


def gang(job_id: str) -> str:
    """Hash of the nodes of a job that runs on several; expires."""
    return f"warmd:gang:{job_id}"


def gang_retry(line: str) -> str:
    """Set while jobs with these needs do not gather nodes: too few came. Expires."""
    return f"warmd:gang:retry:{line}"


def node_left(run: str) -> str:
    """Set while late heartbeats of a daemon that has left are refused; expires."""
    return f"warmd:nodes:left:{run}"


LEASE_S = 15.0  # after this time without renewal, other daemons requeue the worker's jobs


def lease(worker: str) -> str:
    """Lease of a worker; expires seconds after its last renewal."""
    return f"warmd:lease:{worker}"


def http_request(home: str, name: str) -> str:
    """The job that a gateway created for an Idempotency-Key (its hash); kept for a day."""
    return f"warmd:http:{home}:{name}"


def place(connection: redis.Redis) -> str:
    """The address of a Redis and its database, without a password."""
    pool: Any = connection.connection_pool
    about = pool.connection_kwargs
    if "path" in about:
        return str(about["path"])
    service = getattr(pool, "service_name", None)
    where = f"{about.get('host', 'localhost')}:{about.get('port', 6379)}"
    return f"{where if service is None else service}/{about.get('db') or 0}"


def text(raw: Any) -> str:
    """Decode an id or a name from Redis.

    Invalid UTF-8, which other programs may have written, becomes escapes and so matches no name.
    """
    return bytes(raw).decode(errors="backslashreplace")


class Serializer:
    """RQ's serializer: JSON, never pickle, so that write access to Redis is not code execution."""

    @staticmethod
    def dumps(value: Any) -> bytes:
        return orjson.dumps(value)

    @staticmethod
    def loads(data: bytes) -> Any:
        return orjson.loads(data)


def connect(url: str, *, timeout_s: float = 5.0) -> redis.Redis:
    """Return a client that connects at its first command. `timeout_s`: to connect, and per reply.

    redis-py retries a failed command up to ten times. Blocking commands must block for less than
    the timeout.
    """
    return client(
        url,
        socket_connect_timeout=timeout_s,
        socket_timeout=timeout_s,
        health_check_interval=0,
    )


def connect_for_person(url: str) -> redis.Redis:
    """The same for interactive commands: retries while Redis is unreachable, not after a timeout.

    A Redis that hangs is reported at once, and a command that timed out may have been executed.
    """
    connection = connect(url)
    backoff = ExponentialBackoff(cap=1, base=0.01)
    connection.set_retry(Retry(backoff, _RETRIES, (redis.ConnectionError,)))
    return connection


def connect_once(url: str, *, timeout_s: float = 5.0) -> redis.Redis:
    """The same without retries, for loops that must not block, or where retries would not help."""
    connection = connect(url, timeout_s=timeout_s)
    connection.set_retry(Retry(NoBackoff(), 0))
    return connection
