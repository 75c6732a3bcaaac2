"""The jobs of several nodes in which a worker takes part: it gathers, leads, or has a seat."""

from __future__ import annotations

import time

from ...configs.labels import GANG_ADDRESS, GANG_SOFTWARE, Labels
from ..queue.gangs import Gangs
from ..queue.jobs import JobStore
from .attempt import Attempt
from .gathering import Gatherer
from .leading import LedJobs
from .seats import Seats

_TICK_S = 0.25  # between two polls of each gang


class GangWork:
    """The gangs of one worker."""

    def __init__(
        self, store: JobStore, worker: str, node: str, labels: Labels, *, wait_s: float
    ) -> None:
        """`node`: the name of this node. `wait_s`: for nodes to come, and for ranks to connect."""
        address = labels.get(GANG_ADDRESS)
        software = {name: labels[name] for name in (GANG_SOFTWARE,) if name in labels}
        self.gatherer = Gatherer(store, worker, node, address, software, wait_s=wait_s)
        self.led = LedJobs(Gangs(store.connection), address, wait_s=wait_s)
        self.seats = Seats(store, worker, node, address, wait_s=wait_s)
        self._advanced_at = float("-inf")

    @property
    def num_slots(self) -> int:
        """How many slots are reserved for gangs, apart from those of attempts."""
        has_seat = sum(seat.settle is None for seat in self.seats.taken)
        return has_seat + (self.gatherer.gathering is not None)

    def is_ending(self, attempt: Attempt) -> bool:
        """Whether the execution has an end, which waits for the other nodes."""
        return attempt.settle is not None and not self.led.may_settle(attempt)

    def advance(self, *, is_stopping: bool, is_closing: bool) -> None:
        """Do the due work for seats and led jobs. Raises RedisError.

        `is_stopping`, `is_closing`: as for `Seat.advance`.
        """
        now = time.monotonic()
        self.seats.settle()
        if now - self._advanced_at < _TICK_S:
            return
        self._advanced_at = now
        self.led.watch(now)
        self.seats.advance(is_stopping=is_stopping, is_closing=is_closing)
