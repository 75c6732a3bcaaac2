"""`/metrics`: what Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ....configs.queues import QUEUES
from ...client.client import Client
from ...queue.workers import Roster

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """The numbers of this process, and those of the queue."""

    def __init__(self, client: Client) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "warmd_http_requests",
            "Requests answered.",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "warmd_http_request_seconds",
            "From a request to the end of its answer.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tokens = Counter(
            "warmd_http_tokens", "Tokens of answered requests.", ["type"], registry=self._registry
        )
        self._failed_streams = Counter(
            "warmd_http_failed_streams",
            "Streams that ended with an error after their first byte.",
            registry=self._registry,
        )
        self._registry.register(_Queues(client))

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_tokens(self, usage: Mapping[str, int]) -> None:
        """Count the tokens of an answer, by its usage."""
        self._tokens.labels("prompt").inc(usage["prompt_tokens"])
        self._tokens.labels("cached").inc(usage.get("cached_tokens", 0))
        self._tokens.labels("completion").inc(usage.get("completion_tokens", 0))

    def count_failed_stream(self) -> None:
        self._failed_streams.inc()

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format. Asks the server: call it in a thread."""
        return generate_latest(self._registry)


class _Queues(Collector):
    """How many jobs of each status every queue has, read when it is asked for."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        jobs = GaugeMetricFamily("warmd_jobs", "Jobs.", labels=["queue", "status"])
        for queue in self._client.queues():
            for status, number in queue.items():
                if status != "name":
                    jobs.add_metric([queue["name"], status], number)
        workers = GaugeMetricFamily(
            "warmd_workers", "Workers that give signs of life.", labels=["queue"]
        )
        living = dict.fromkeys(QUEUES, 0)
        roster = Roster(self._client.store)
        for name, worker_queue in roster.workers().items():
            living[worker_queue] += roster.has_lease(name)
        for queue_name, number in living.items():
            workers.add_metric([queue_name], number)
        return [jobs, workers]

    def describe(self) -> Iterable[Metric]:
        return []  # or the server would be asked when the process starts
