"""Metrics of queues, jobs, workers and nodes; read from Redis on each scrape.

The cost does not depend on the number of ended jobs: their durations are counted when they end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ....configs.queues import QUEUES
from ....jobs import KINDS
from ...client.client import Client
from ...queue import listing, nodes, totals
from ...queue.totals import BOUNDS_S, Durations, Totals
from ...queue.workers import WorkerRegistry

_NODE_STATES = (nodes.READY, nodes.STARTING, nodes.DRAINING, nodes.SILENT)


class JobMetrics(Collector):
    """Metrics from Redis: jobs, and the processes that run them."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        yield from self._queues()
        yield from self._processes()
        yield from _counters(totals.read(self._client.connection))

    def describe(self) -> Iterable[Metric]:
        return []  # otherwise registering would read Redis

    def _queues(self) -> Iterable[Metric]:
        jobs = GaugeMetricFamily(
            "warmd_jobs", "Jobs by queue and status.", labels=["queue", "status"]
        )
        oldest = GaugeMetricFamily(
            "warmd_queue_oldest_waiting_seconds",
            "Time for which the oldest waiting job of a queue has been queued, 0 if none waits.",
            labels=["queue"],
        )
        for queue in self._client.jobs.queues():
            name = queue.pop("name")
            for status, number in queue.items():
                jobs.add_metric([name, status], number)
            oldest.add_metric([name], listing.oldest_wait_s(self._client.connection, name))
        return [jobs, oldest]

    def _processes(self) -> Iterable[Metric]:
        workers = GaugeMetricFamily(
            "warmd_workers", "Workers with a current heartbeat.", labels=["queue"]
        )
        living = dict.fromkeys(QUEUES, 0)
        registry = WorkerRegistry(self._client.store)
        every, silent = registry.workers(), registry.silent()
        for name, queue in every.items():
            living[queue] += name not in silent
        for queue, number in living.items():
            workers.add_metric([queue], number)
        machines = GaugeMetricFamily(
            "warmd_nodes", "Daemons that share this Redis, by state.", labels=["state"]
        )
        states = [node.state for node in self._client.nodes.all()]
        for state in _NODE_STATES:
            machines.add_metric([state], states.count(state))
        return [workers, machines]


def _counters(found: Totals) -> Iterable[Metric]:
    durations = HistogramMetricFamily(
        "warmd_job_duration_seconds",
        "Time from the first start of a job to its end, by kind and status.",
        labels=["kind", "status"],
    )
    for labels, duration in sorted(found.durations.items()):
        durations.add_metric(list(labels), _buckets(duration), duration.sum_s)
    requeues = CounterMetricFamily(
        "warmd_job_requeues",
        "Executions after which a job was queued again: requested (a stop or pause), horse_died, "
        "worker_died, model_missing, or failed with retries left.",
        labels=["kind", "reason"],
    )
    for pair, number in _with_zeros(found.requeued, totals.REASONS):
        requeues.add_metric(pair, number)
    alerts = CounterMetricFamily(
        "warmd_job_alerts",
        "Events of jobs that someone should look at: save_failed, stall, divergence, "
        "reward_failed, warning.",
        labels=["kind", "type"],
    )
    for pair, number in _with_zeros(found.alerts, totals.ALERTS):
        alerts.add_metric(pair, number)
    restarts = CounterMetricFamily(
        "warmd_process_restarts",
        "Processes of a daemon that died and were started again.",
        labels=["process"],
    )
    for process in totals.PROCESSES:
        restarts.add_metric([process], found.restarted.get(process, 0))
    return [durations, requeues, alerts, restarts]


def _with_zeros(
    found: Mapping[tuple[str, str], int], words: Iterable[str]
) -> Iterable[tuple[list[str], int]]:
    """All pairs of a kind and one of the words, also those that never occurred.

    Prometheus sees no increase in a counter that begins with 1.
    """
    for kind, word in sorted({*found, *product(KINDS, words)}):
        yield [kind, word], found.get((kind, word), 0)


def _buckets(duration: Durations) -> list[tuple[str, float]]:
    """Prometheus' cumulative buckets; bounds of other versions of warmd stay."""
    bounds = sorted({*map(float, BOUNDS_S), *duration.counts, float("inf")})
    cumulative, buckets = 0, []
    for bound in bounds:
        cumulative += duration.counts.get(bound, 0)
        # As prometheus_client writes the bounds of its own histograms.
        label = "+Inf" if bound == float("inf") else str(bound)
        buckets.append((label, float(cumulative)))
    return buckets
