"""Counters of all jobs and processes of one Redis, for `/metrics`: durations, requeues, alerts.

They are kept in one hash, so that reading them costs the same after ten jobs and after a million,
every gateway shows the same, and a restart loses nothing.

    duration:KIND:STATUS:BOUND   ended jobs whose duration has BOUND as its bucket
    duration:KIND:STATUS:sum     their seconds
    requeued:KIND:REASON         executions after which the job was queued again
    alert:KIND:TYPE              events of jobs that need attention
    restarted:PROCESS            restarts of a daemon's processes
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import redis
from redis.client import Pipeline

from ...jobs.ids import kind_of
from . import keys
from .rq_format import Job, JobStatus

Reason = Literal["requested", "horse_died", "worker_died", "failed", "model_missing"]
REASONS: tuple[Reason, ...] = get_args(Reason)

PROCESSES = ("supervisor", "redis", "zygote", "worker", "gateway")  # that are restarted

ALERTS = ("stall", "divergence", "save_failed", "reward_failed", "warning")

# From an answer within a moment to a training of three days.
BOUNDS_S = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14_400, 43_200, 86_400, 259_200)

# Both use Redis' clock, as a job may begin on one machine and end on another. The time of an
# earlier execution stays. KEYS: job; ARGV: field.
_BEGIN = """
local now = redis.call('TIME')
redis.call('HSETNX', KEYS[1], ARGV[1], string.format('%.6f', now[1] + now[2] / 1e6))
"""
# A job that an earlier version began has no such time. KEYS: job, totals; ARGV: field, prefix,
# bounds.
_END = """
local began = tonumber(redis.call('HGET', KEYS[1], ARGV[1]) or '')
if not began then return end
local now = redis.call('TIME')
local took = math.max(now[1] + now[2] / 1e6 - began, 0)
local bound = '+Inf'
for i = 3, #ARGV do
  if took <= tonumber(ARGV[i]) then bound = ARGV[i] break end
end
redis.call('HINCRBY', KEYS[2], ARGV[2] .. bound, 1)
redis.call('HINCRBYFLOAT', KEYS[2], ARGV[2] .. 'sum', string.format('%.6f', took))
"""


@dataclass
class Durations:
    """How long the jobs of a kind with one status took."""

    counts: dict[float, int] = field(default_factory=dict)  # bound in seconds -> jobs in its bucket
    sum_s: float = 0.0


@dataclass
class Totals:
    """All counters; those that are 0 may be left out."""

    durations: dict[tuple[str, str], Durations]  # by kind and status
    requeued: dict[tuple[str, str], int]  # by kind and reason
    alerts: dict[tuple[str, str], int]  # by kind and type of event
    restarted: dict[str, int]  # by process


def begun(pipeline: Pipeline, job: Job) -> None:
    """Note when a job began, in the transaction that starts an execution."""
    pipeline.eval(_BEGIN, 1, job.key, keys.FIELD_BEGUN)


def ended(pipeline: Pipeline, job: Job, status: JobStatus) -> None:
    """Count the end of a job, in the transaction that ends it and before its fields are removed."""
    prefix = f"duration:{kind_of(job.id)}:{status.value}:"
    pipeline.eval(_END, 2, job.key, keys.TOTALS, keys.FIELD_BEGUN, prefix, *map(str, BOUNDS_S))


def requeued(pipeline: Pipeline, job: Job, reason: Reason) -> None:
    """Count an execution after which the job is queued again, in the transaction that ends it."""
    pipeline.hincrby(keys.TOTALS, f"requeued:{kind_of(job.id)}:{reason}", 1)


def alerted(connection: redis.Redis, job_id: str, type: str) -> None:
    """Count an event of one of the types in ALERTS."""
    connection.hincrby(keys.TOTALS, f"alert:{kind_of(job_id)}:{type}", 1)


def restarted(connection: redis.Redis, process: str) -> None:
    """Count the restart of a process of a daemon."""
    connection.hincrby(keys.TOTALS, f"restarted:{process}", 1)


def read(connection: redis.Redis) -> Totals:
    """Return all counters, in one round trip."""
    durations: dict[tuple[str, str], Durations] = defaultdict(Durations)
    totals = Totals(durations, {}, {}, {})
    found: Any = connection.hgetall(keys.TOTALS)
    for raw, number in found.items():
        match keys.text(raw).split(":"):
            case ["duration", kind, status, "sum"]:
                durations[kind, status].sum_s = float(number)
            case ["duration", kind, status, bound]:
                durations[kind, status].counts[float(bound)] = int(number)
            case ["requeued", kind, reason]:
                totals.requeued[kind, reason] = int(number)
            case ["alert", kind, type]:
                totals.alerts[kind, type] = int(number)
            case ["restarted", process]:
                totals.restarted[process] = int(number)
    return totals
