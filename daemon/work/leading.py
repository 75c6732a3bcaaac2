"""Leading jobs of several nodes: this worker has rank 0 and watches the other nodes.

Rank 0 runs in an ordinary execution. It ends when one of the other nodes is lost: the job is queued
again as after any death. The end of the execution is reported when the other nodes have ended their
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import redis

from ..host.messages import GangPlan
from ..queue.gang_records import ENDED, FAILED, JOINED, LOST, Gang
from ..queue.gangs import Gangs
from ..queue.keys import LEASE_S
from .attempt import Attempt
from .gathering import Gathering

_OWN_REPORT_S = 2.0  # for the horse here to report a failure that another node has reported


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
        if attempt.settle is not None or attempt.request is None:
            return  # its end releases the nodes
        try:
            started = attempt.started
            has_begun = self._gangs.begin(job_id, token, started.number, started.claim)
            gang = self._gangs.gang(job_id)
        except redis.RedisError:
            attempt.release()  # without a plan its ranks must not start
            raise
        if gang is None or not has_begun or self._address is None:
            attempt.end_ranks("a node has left before the start")
            return
        plan = GangPlan(gang.nodes, node=0, address=self._address, secret=token)
        attempt.request = replace(attempt.request, gang=plan)

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
        if attempt.settle is not None:
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
