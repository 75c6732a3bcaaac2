"""This node's parts in jobs that other nodes lead: the other ranks, without rank 0.

A worker with a seat keeps a slot for it. The ranks start when rank 0 listens. They end when the
leader requests it, when its claim or its lease is gone, and with the lease of this worker.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from ...configs.labels import Labels, unmet
from ...jobs.errors import WarmdError
from ...jobs.files.shortage import Shortage
from ..host.messages import (
    Downloaded,
    Failure,
    GangPlan,
    JobOutcome,
    Message,
    RunJob,
)
from ..queue.gangs import (
    ENDED,
    FAILED,
    JOINED,
    LOST,
    STARTED,
    Gang,
    Gangs,
    Seat as SeatState,
)
from ..queue.jobs import Job, JobStore
from .horse import Horse

log = logging.getLogger(__name__)


class Seat:
    """A seat that this worker has taken and not yet released."""

    def __init__(
        self, gangs: Gangs, job: Job, token: str, worker: str, node: str, request: RunJob
    ) -> None:
        """`request`: for the horse, still without the execution and the gang."""
        self.job = job
        self.request = request
        self.horse: Horse | None = None
        self.settle: Callable[[], object] | None = None  # the report of its end, once it has one
        self._gangs = gangs
        self._token = token
        self._worker = worker
        self._state = SeatState(node)
        self._reported = self._state
        self._is_leaving = False

    @property
    def has_begun(self) -> bool:
        """Whether the execution had begun when the gang was last read."""
        return self.request.gang is not None

    @property
    def is_downloading(self) -> bool:
        """Whether the model is still being downloaded."""
        model = self.request.model
        return self.settle is None and model is not None and model.folder is None

    @property
    def needs_horse(self) -> bool:
        """Whether rank 0 waits for the ranks of this node."""
        is_ready = self.request.gang is not None and not self.is_downloading
        return is_ready and self.horse is None and self.settle is None and not self._is_leaving

    def advance(self, address: str, *, is_stopping: bool, is_closing: bool) -> None:
        """Do the work that the gang requires now. Raises RedisError.

        `address`: where the ranks of this node listen. `is_stopping`: the worker ends when the job
        has saved. `is_closing`: it begins no more jobs.
        """
        gang = self._gangs.gang(self.job.id)
        if gang is None or gang.token != self._token or not self._goes_on(gang):
            self.leave()
            return
        if (
            (is_stopping or is_closing)
            and gang.execution is None
            and self._gangs.leave(self.job.id, self._token, self._worker)
        ):
            self._end(ENDED)
            return
        if gang.port is not None and gang.execution is not None and self.request.gang is None:
            plan = GangPlan(
                nodes=gang.nodes,
                node=gang.workers.index(self._worker),
                address=address,
                secret=self._token,
                host=gang.host,
                port=gang.port,
            )
            self.request = replace(self.request, execution=gang.execution, gang=plan)
        has_started = self._state.state == JOINED and self.horse and self.horse.has_started
        self._state = replace(
            self._state,
            state=STARTED if has_started else self._state.state,
            wants_end=self._state.wants_end or is_stopping,
        )
        if self._state != self._reported:
            self._gangs.report(self.job.id, self._token, self._worker, self._state)
            self._reported = self._state

    def _goes_on(self, gang: Gang) -> bool:
        """Whether the leader still gathers nodes or runs the execution."""
        has_ended = gang.claim is not None and not gang.has_claim
        return (
            self._worker in gang.seats
            and gang.is_leader_alive
            and not (gang.is_ending or has_ended)
        )

    def give(self, horse: Horse) -> None:
        """Let a horse run the ranks. It replaces a horse that the zygote did not fork."""
        self.horse = horse

    def leave(self) -> None:
        """End the ranks of this node: the job has ended, or continues elsewhere."""
        self._is_leaving = True
        if self.settle is not None:
            return
        if self.horse is None:
            self._end(ENDED)
        else:
            self.horse.kill()  # in every tick: it may have been forked just now

    def fail(self, error: str) -> None:
        """Report that the ranks of this node cannot run."""
        self._end(FAILED, error)

    # --- messages about the job, as for an Attempt ------------------------------------------------

    def handle(self, message: Message) -> None:
        """Handle a message from the horse, the zygote or a download."""
        match message:
            case JobOutcome(outcome="failed"):
                self._end(FAILED, message.error)
            case JobOutcome(outcome="lost"):
                self._end(LOST, message.error)
            case JobOutcome():
                self._end(ENDED)
            case Failure():
                self._end(FAILED, message.error)
            case Downloaded() if self.request.model is not None:
                model = replace(self.request.model, folder=message.folder)
                self.request = replace(self.request, model=model)

    def set_lacking(self, lacking: Shortage | None) -> None:
        """Log what this machine lacks for the download; the job is shown as gathering its nodes."""
        if lacking is not None:
            log.warning("%s: waits for %s: %s", self.job.id, lacking.what, lacking.reason)

    def detach(self) -> None:
        """Drop a horse that never started; the next one is requested soon."""
        self.horse = None

    def conclude_death(self, *, is_shared: bool) -> None:
        """Report that the horse has died, unless that was requested."""
        assert self.horse is not None
        if self._is_leaving:
            self._end(ENDED)
        else:
            self._end(LOST, self.horse.cause_of_death())

    def _end(self, state: str, detail: str = "") -> None:
        if self.settle is not None:
            return
        if detail:
            log.warning("%s: %s: its ranks here: %s", self.job.id, self._worker, detail)
        self._state = replace(self._state, state=state, detail=detail)
        # If the gang is gone, nobody waits for the report.
        self.settle = lambda: self._gangs.report(
            self.job.id, self._token, self._worker, self._state
        )


class Seats:
    """Takes seats, and reports their end."""

    def __init__(
        self, store: JobStore, worker: str, node: str, address: str | None, *, wait_s: float
    ) -> None:
        """`node`: the name of this node. `address`: where its ranks listen; None: it takes no seat.

        `wait_s`: after a job that cannot run here.
        """
        self.taken: list[Seat] = []
        self.num_begun = 0  # seats whose execution has begun
        self._store = store
        self._gangs = Gangs(store.connection)
        self._worker = worker
        self._node = node
        self._address = address
        self._wait_s = wait_s
        self._refused: tuple[str, float] = ("", 0.0)  # a job without a seat for this node, and when

    def take(self, job_id: str, labels: Labels, request: Callable[[Job], RunJob]) -> Seat | None:
        """Take a seat in the job that gathers, if there is one that this node can run.

        `labels`: of this node. `request`: makes the request for a horse; raises WarmdError.
        """
        now = time.monotonic()
        has_refused = self._refused[0] == job_id and now - self._refused[1] < self._wait_s
        if self._address is None or has_refused:
            return None
        gang, job = self._gangs.gang(job_id), self._store.fetch(job_id)
        if gang is None or job is None or unmet(gang.needs, labels):
            return None
        try:
            wanted = request(job)
        except (WarmdError, OSError, LookupError, TypeError, ValueError) as error:  # damaged
            log.info("%s: %s: takes no part: %r", job_id, self._worker, error)
            self._refused = job_id, now
            return None
        home_key = self._worker.split(":")[1]
        token = self._gangs.join(job_id, self._worker, home_key, self._node)
        if token is None:
            return None
        log.info("%s: %s: takes part, led by %s", job_id, self._worker, gang.node)
        seat = Seat(self._gangs, job, token, self._worker, self._node, wanted)
        self.taken.append(seat)
        return seat

    def release(self) -> None:
        """End the ranks of other nodes' jobs here: this worker's lease runs out."""
        for seat in self.taken:
            seat.leave()

    def settle(self) -> None:
        """Report the end of seats that have one. Raises RedisError."""
        for seat in list(self.taken):
            if seat.settle is not None:
                seat.settle()
                self.taken.remove(seat)

    def advance(self, *, is_stopping: bool, is_closing: bool) -> None:
        """Do what their gangs require now; arguments as for `Seat.advance`. Raises RedisError."""
        if self._address is not None:
            for seat in self.taken:
                had_begun = seat.has_begun
                seat.advance(self._address, is_stopping=is_stopping, is_closing=is_closing)
                self.num_begun += seat.has_begun and not had_begun
