"""The state of a worker: its jobs, their horses, and its connections to Redis."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...configs.config import WorkerConfig
from ..host.downloads import Downloads
from ..host.home import Home
from ..queue.jobs import JobStore
from ..queue.mailbox import Mailbox
from ..queue.stream import StreamWriter
from ..queue.workers import Lease, WorkerRegistry
from .attempt import Attempt
from .gangs import GangWork
from .horse_pool import HorsePool
from .seat import Seat
from .stored_runs import StoredRuns


@dataclass(frozen=True, kw_only=True)
class Held:
    """The state that all parts of one worker share."""

    home: Home
    config: WorkerConfig
    name: str
    is_shared: bool  # workers of other daemons may take its jobs when its lease ends
    store: JobStore
    registry: WorkerRegistry
    writer: StreamWriter
    mailbox: Mailbox
    lease: Lease
    stored: StoredRuns | None  # None: run directories are in the home
    horses: HorsePool
    gangs: GangWork
    downloads: Downloads = field(default_factory=Downloads)
    attempts: list[Attempt] = field(default_factory=list)

    @property
    def taken(self) -> list[Attempt | Seat]:
        """All jobs of which it runs ranks."""
        return [*self.attempts, *self.gangs.seats.taken]

    def has_room(self) -> bool:
        """Whether a slot is free."""
        # Suspects without a horse take no slot.
        # Nor do ended jobs whose files are being uploaded.
        slots = [a for a in self.attempts if a.settle is None or a.is_stored]
        running = sum(not (a.is_suspect and a.horse is None) for a in slots)
        taken = running + self.gangs.num_slots + self.horses.num_leaving
        return taken < self.config.slots
