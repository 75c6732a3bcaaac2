"""The jobs of several nodes in which a worker takes part: it gathers, leads, or has a seat.

The worker that pops such a job gathers nodes for it: the job is queued still, and begins when all
have come. If they do not come in time, they are released, and the job is set aside.

Then it leads: it has rank 0, which runs in an ordinary execution, and watches the other nodes
(seats.py). The execution ends when one of them is lost: the job is queued again as after any death.
Its end is reported when the other nodes have ended their ranks.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path

import redis

from ...configs.labels import GANG_ADDRESS, GANG_SOFTWARE, Labels, num_nodes
from ...jobs.errors import WarmdError
from ..host.messages import GangPlan
from ..lifecycle.follow import Publisher
from ..queue import keys
from ..queue.gangs import ENDED, FAILED, JOINED, LOST, Gang, Gangs
from ..queue.jobs import JobStore
from ..queue.keys import LEASE_S
from ..queue.stream import StreamWriter
from ..runs.events import EventLog
from ..runs.rundir import RunDir
from .attempt import Attempt
from .seats import Seats

log = logging.getLogger(__name__)

_LOG_LOCK_TIMEOUT_S = 1.0  # for another process to finish writing an event
_OWN_REPORT_S = 2.0  # for the horse here to report a failure that another node has reported
_TICK_S = 0.25  # between two polls of each gang


@dataclass
class Gathering:
    """A popped job for which nodes are gathered."""

    popped: bytes
    token: str
    needs: Labels  # of the job, and the software of this node
    deadline: float
    num_joined: int = 0  # nodes, without this one; -1: the job does not wait here any more

    @property
    def job_id(self) -> str:
        return keys.text(self.popped)


class Gatherer:
    """Gathers nodes for one job at a time."""

    def __init__(
        self,
        store: JobStore,
        worker: str,
        node: str,
        address: str | None,
        software: Labels,
        *,
        wait_s: float,
    ) -> None:
        """`node`: the name of this node. `address`: where its ranks listen; None: it has none.

        `software`: the label that the other nodes must have too. `wait_s`: for nodes to come.
        """
        self.gathering: Gathering | None = None
        self._store = store
        self._gangs = Gangs(store.connection)
        self._worker = worker
        self._node = node
        self._address = address
        self._software = software
        self._wait_s = wait_s
        self._warned: dict[str, int] = {}  # nodes that came, by job, as of the latest event

    def may_gather(self, needs: Labels) -> bool:
        """Whether a job with these needs can be gathered for now."""
        return self._address is not None and self._gangs.may_gather({**needs, **self._software})

    def gather(self, popped: bytes, needs: Labels) -> bool:
        """Begin to gather nodes for a job; False while another job gathers."""
        if self.gathering is not None:
            return False
        needs = {**needs, **self._software}
        token = self._gangs.open(keys.text(popped), self._worker, self._node, needs)
        if token is None:
            return False
        deadline = time.monotonic() + self._wait_s
        self.gathering = Gathering(popped, token, needs, deadline)
        log.info("%s: %s: gathers %d nodes", keys.text(popped), self._worker, num_nodes(needs))
        return True

    def gathered(self) -> tuple[Gathering, bool] | None:
        """Return the gathering if it is over, and whether all nodes came."""
        now, gathering = time.monotonic(), self.gathering
        if gathering is None:
            return None
        found = self._gangs.close(gathering.job_id, gathering.token)
        gathering.num_joined = found
        if found == num_nodes(gathering.needs) - 1:
            self.gathering = None
            return gathering, True
        if found >= 0 and now < gathering.deadline:
            return None
        self.gathering = None
        if found < 0:
            self._gangs.dissolve(gathering.job_id, gathering.token)
        else:
            self._gangs.give_up(
                gathering.job_id, gathering.token, gathering.needs, pause_s=self._wait_s
            )
        return gathering, False

    def warn(self, gathering: Gathering, runs: Path, writer: StreamWriter) -> None:
        """Log an event about the nodes that are missing, unless the latest one was the same."""
        came, wanted = gathering.num_joined + 1, num_nodes(gathering.needs)
        if self._warned.get(gathering.job_id) == came:
            return
        self._warned[gathering.job_id] = came
        try:
            path = RunDir.open(runs, gathering.job_id).events
            with EventLog(
                path,
                execution=self._store.num_executions(gathering.job_id),
                clock_offset_s=self._store.shared_clock.latest_offset_s,
                publish=Publisher(writer, gathering.job_id, path).publish,
                patience_s=_LOG_LOCK_TIMEOUT_S,
            ) as events:
                events.emit(
                    "warning",
                    message=f"nodes: {came} of {wanted} were free within {self._wait_s:g} s: the "
                    "job waits, and others may pass",
                )
        except (OSError, WarmdError) as error:
            log.warning("%s: event not written: %s", gathering.job_id, error)

    def drop(self) -> None:
        """Release the nodes that came: the job goes back to the queue."""
        gathering, self.gathering = self.gathering, None
        if gathering is not None:
            self._gangs.dissolve(gathering.job_id, gathering.token)

    def dissolve(self, gathering: Gathering) -> None:
        """Release all nodes: the job has not begun."""
        self._gangs.dissolve(gathering.job_id, gathering.token)


@dataclass
class _Led:
    """A gang whose leader is this worker."""

    attempt: Attempt
    token: str
    has_listened: bool = False
    connect_by: float | None = None  # once all nodes have started their ranks
    failed_at: float | None = None  # when a node reported a failure
    end_by: float | None = None  # once the execution has an end
    has_ended: bool = False  # on all other nodes


class LedJobs:
    """The jobs of several nodes whose leader is this worker."""

    def __init__(self, gangs: Gangs, address: str | None, *, wait_s: float) -> None:
        """`address`: where rank 0 listens; None: no such jobs run here.

        `wait_s`: for ranks to connect.
        """
        self._gangs = gangs
        self._address = address
        self._wait_s = wait_s
        self._led: dict[str, _Led] = {}

    def lead(self, attempt: Attempt, gathering: Gathering) -> None:
        """Run an execution that has just begun together with the nodes that came.

        Raises RedisError; the job is queued again then.
        """
        job_id, token = gathering.job_id, gathering.token
        self._led[job_id] = _Led(attempt, token)
        if attempt.has_ended or attempt.request is None:
            return  # its end releases the nodes
        try:
            started = attempt.started
            gang = self._gangs.begin(job_id, token, started.number, started.claim)
        except redis.RedisError:
            attempt.release()  # without a plan its ranks must not start
            raise
        if gang is None or self._address is None:
            attempt.end_ranks("a node has left before the start")
            return
        plan = GangPlan(gang.nodes, node=0, address=self._address, secret=token)
        attempt.join(plan)

    def watch(self, now: float) -> None:
        """Compare all gangs with the executions here. Raises RedisError."""
        for led in list(self._led.values()):
            self._watch(led, now)

    def _watch(self, led: _Led, now: float) -> None:
        """Compare the state of the other nodes with that of the execution here."""
        attempt, job_id = led.attempt, led.attempt.job.id
        gang = self._gangs.gang(job_id, renew=True)
        if gang is None or gang.token != led.token:
            led.has_ended = True
            attempt.end_ranks("its record in Redis has expired")
            return
        if attempt.has_ended:
            self._watch_end(led, gang, now)
            return
        if attempt.gang_port is not None and not led.has_listened and self._address is not None:
            led.has_listened = self._gangs.listen(
                job_id, led.token, self._address, attempt.gang_port
            )
        if len(gang.seats) < gang.size - 1:
            attempt.end_ranks("a node has no seat any more")
        for worker, seat in gang.seats.items():
            if seat.wants_end:
                attempt.stop("drain")
            if seat.state == LOST:
                attempt.end_ranks(f"on node {seat.node}: {seat.detail}", have_died=True)
            elif seat.state == FAILED:
                led.failed_at = led.failed_at or now
                if now - led.failed_at > _OWN_REPORT_S:
                    attempt.end_ranks(f"{seat.detail} (on node {seat.node})", have_failed=True)
            elif seat.state != ENDED and worker not in gang.alive:
                attempt.end_ranks(f"node {seat.node} was lost")
        have_started = all(seat.state != JOINED for seat in gang.seats.values())
        if led.has_listened and have_started and not attempt.has_gang_met:
            led.connect_by = led.connect_by or now + self._wait_s
            if now > led.connect_by:
                attempt.end_ranks(
                    f"the ranks of {', '.join(gang.nodes)} did not connect within "
                    f"{self._wait_s:g} s (gang_wait): can the nodes reach each other at their "
                    "gang_address?",
                    have_died=True,
                )

    def _watch_end(self, led: _Led, gang: Gang, now: float) -> None:
        """Ask the other nodes to end their ranks, and note when all have."""
        if led.end_by is None:
            led.end_by = now + LEASE_S
            self._gangs.end(led.attempt.job.id, led.token)
        over = (ENDED, FAILED, LOST)
        running = [w for w, seat in gang.seats.items() if seat.state not in over]
        led.has_ended = now > led.end_by or not any(worker in gang.alive for worker in running)

    def may_settle(self, attempt: Attempt) -> bool:
        """Whether all other nodes have ended the execution, or can be waited for no longer."""
        led = self._led.get(attempt.job.id)
        return led is None or led.attempt is not attempt or led.has_ended

    def settled(self, attempt: Attempt) -> None:
        """Called when the end of an execution is in Redis."""
        led = self._led.get(attempt.job.id)
        if led is not None and led.attempt is attempt:
            del self._led[attempt.job.id]
            self._gangs.dissolve(attempt.job.id, led.token)


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
        return attempt.has_ended and not self.led.may_settle(attempt)

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
