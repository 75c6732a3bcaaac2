"""Estimates when a waiting request or training job will start (Retry-After, x-warmd-eta)."""

from __future__ import annotations

import statistics
from collections import deque

from ....configs.config import DaemonConfig
from ....configs.queues import INFER, TRAIN
from ...client.client import Client
from ...queue import listing

_REMEMBERED = 50
_TRAINING_S = 60.0  # where no running training job has an ETA


class StartEstimator:
    """Estimates waiting times from the service times of the latest requests."""

    def __init__(self, config: DaemonConfig) -> None:
        infer = [worker for worker in config.workers if worker.queue == INFER]
        self._at_once = sum(worker.slots for worker in infer) or 1
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def record(self, seconds: float) -> None:
        """Record the service time of a request, without its wait in the queue."""
        self._seconds.append(max(seconds, 0.0))  # the clock may have been set back

    def start_in_s(self, position: int) -> float | None:
        """Return the seconds until the request at a queue position starts; None if unknown."""
        if not self._seconds:
            return None
        return round(statistics.median(self._seconds) * position / self._at_once, 1)


def next_training_s(client: Client) -> float:
    """Return the seconds until the first running training job is done. Reads Redis."""
    running = [job_id for job_id, _ in listing.started(client.connection, TRAIN)]
    etas = [client.jobs.get(job_id)["eta_s"] for job_id in running]
    return min((eta for eta in etas if eta is not None), default=_TRAINING_S)
