"""Metrics of the trainings that run now; read from their event streams on each scrape."""

from __future__ import annotations

import math
from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ....configs.queues import TRAIN
from ....jobs.ids import kind_of
from ...client.client import Client
from ...queue import listing, stream
from ...runs.estimate import Estimate

_RECENT = 64  # events per job: enough for the rate of the recent steps
_LABELS = ["kind", "job_id"]
_METRICS = ("loss", "reward")  # of the step events


class TrainingMetrics(Collector):
    """Steps, step rate, loss and reward of each training that runs."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def collect(self) -> Iterable[Metric]:
        step = GaugeMetricFamily(
            "warmd_training_step", "Latest optimizer step of a running training.", labels=_LABELS
        )
        rate = GaugeMetricFamily(
            "warmd_training_steps_per_second",
            "Median rate of the recent steps, without evaluations and checkpoints.",
            labels=_LABELS,
        )
        values = {
            name: GaugeMetricFamily(
                f"warmd_training_{name}", f"The {name} of the latest step.", labels=_LABELS
            )
            for name in _METRICS
        }
        connection = self._client.connection
        ids = [job_id for job_id, _ in listing.started(connection, TRAIN)]
        recent = stream.newest(connection, dict.fromkeys(ids, _RECENT))
        for job_id, events in zip(ids, recent, strict=True):
            labels = [kind_of(job_id), job_id]
            estimate = Estimate()
            for event in reversed(events):
                estimate.update(event)
            steps = [event for event in events if event["type"] == "step"]
            if not steps:
                continue
            step.add_metric(labels, steps[0]["step"])
            if estimate.seconds_per_step:
                rate.add_metric(labels, 1 / estimate.seconds_per_step)
            for name, metric in values.items():
                value = steps[0].get(name)
                if isinstance(value, int | float):
                    metric.add_metric(labels, value)
                elif name in steps[0]:  # JSON has no NaN
                    metric.add_metric(labels, math.nan)
        return [step, rate, *values.values()]

    def describe(self) -> Iterable[Metric]:
        return []  # otherwise registering would read Redis
