"""How soon a waiting request will have its answer, or a training its turn."""

from __future__ import annotations

import statistics
from collections import deque

from ....configs.config import DaemonConfig
from ....configs.queues import INFER, TRAIN
from ...client.client import Client
from ...queue import listing

_REMEMBERED = 50
_TRAINING_S = 60.0  # until the next training begins, where none that runs says how long it takes


class Pace:
    """The service times of the latest requests."""

    def __init__(self, config: DaemonConfig) -> None:
        infer = [worker for worker in config.workers if worker.queue == INFER]
        self._at_once = sum(worker.slots for worker in infer) or 1
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)

    def note(self, seconds: float) -> None:
        """Note how long a request was worked on, its wait not counted."""
        self._seconds.append(seconds)

    def eta_s(self, position: int) -> float | None:
        """Return in how many seconds the request at a place will begin; None when not known yet."""
        if not self._seconds:
            return None
        return round(statistics.median(self._seconds) * position / self._at_once, 1)


def next_training_s(client: Client) -> float:
    """Return in how many seconds a training that runs will be done. Asks the server."""
    running = [job_id for job_id, _ in listing.started(client.connection, TRAIN)]
    etas = [client.job(job_id)["eta_s"] for job_id in running]
    return min((eta for eta in etas if eta is not None), default=_TRAINING_S)
