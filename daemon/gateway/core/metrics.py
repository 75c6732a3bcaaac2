"""Prometheus metrics for `/metrics`: the requests of this gateway, and counters from Redis."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ...client.client import Client
from .job_metrics import JobMetrics
from .machine_metrics import MachineMetrics
from .training_metrics import TrainingMetrics

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)


class Metrics:
    """Counters of this process, and values read on each scrape."""

    def __init__(self, client: Client) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "warmd_http_requests",
            "HTTP requests by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._seconds = Histogram(
            "warmd_http_request_seconds",
            "Seconds from a request to the end of its response.",
            ["route"],
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._tokens = Counter(
            "warmd_http_tokens",
            "Tokens of completed requests by type.",
            ["type"],
            registry=self._registry,
        )
        self._failed_streams = Counter(
            "warmd_http_failed_streams",
            "Streams that failed after their first byte.",
            registry=self._registry,
        )
        for collector in (JobMetrics(client), TrainingMetrics(client), MachineMetrics(client)):
            self._registry.register(collector)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        self._requests.labels(route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def count_tokens(self, usage: Mapping[str, int]) -> None:
        """Count the tokens of a response."""
        self._tokens.labels("prompt").inc(usage["prompt_tokens"])
        self._tokens.labels("cached").inc(usage.get("cached_tokens", 0))
        self._tokens.labels("completion").inc(usage.get("completion_tokens", 0))

    def count_failed_stream(self) -> None:
        self._failed_streams.inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format. Reads Redis: call it in a thread."""
        return generate_latest(self._registry)
