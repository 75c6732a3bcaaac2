"""Taking jobs: popped from the queue, set aside for this worker's labels, or a seat in a gang."""

from __future__ import annotations

import logging
import time
from collections import deque

import redis

from ...configs.labels import (
    NODES,
    SCHEMA as SCHEMA_LABEL,
    Labels,
    line_of,
    num_nodes,
)
from ...jobs.errors import WarmdError
from ...jobs.files.shortage import shortage
from ..host.machine import machine_name
from ..host.messages import RunJob
from ..queue import keys, others
from ..queue.jobs import Job
from ..queue.waiting import Offer
from ..runs.rundir import SCHEMA, RunDir
from . import model_folders
from .attempt import Attempt
from .gangs import Gathering
from .held import Held, Leaving
from .preparation import prepare, request_of

log = logging.getLogger(__name__)

_LOOK_S = 1.0  # between two checks for jobs that were set aside


class JobTaker:
    """Fills the free slots of a worker."""

    def __init__(self, held: Held, leaving: Leaving, labels: Labels) -> None:
        """`labels`: jobs that need others are set aside."""
        self.may_take = True  # as of the latest check: workers are not suspended
        self._held = held
        self._name, self._queue = held.name, held.config.queue
        self._store, self._mailbox, self._gangs = held.store, held.mailbox, held.gangs
        self._leaving = leaving
        self._offer = Offer(
            {**labels, SCHEMA_LABEL: str(SCHEMA)},
            self._has_model,
            held.gangs.gatherer.may_gather,
        )
        self._gathering: str | None = None  # the job that gathers nodes, as of the latest check
        self._unprepared: list[Attempt] = []  # taken, and not read yet because of a shortage
        self._met: list[str] = []  # needs for which jobs may be set aside, met by the labels
        self._looked = 0.0
        self._listed = 0.0  # time of the latest check for jobs that were popped for it
        self._has_others = False  # whether the queue may have jobs of other applications
        self._left: deque[bytes] = deque(maxlen=100)  # their latest ids; each is logged once

    def reconcile(self) -> None:
        """Requeue the jobs that this worker holds in Redis and does not run.

        Redis may have made a change and died before it replied.
        """
        self._gangs.gatherer.drop()
        spare = [attempt.started.claim for attempt in self._held.attempts]
        for job_id in self._held.registry.reclaim(self._name, self._queue, spare=spare):
            log.warning("%s: requeued, %s does not run it", job_id, self._name)

    def take(self) -> None:
        """Start the next job if there is a free slot."""
        self._prepare_again()
        is_over, popped = self._mailbox.job()
        if self._leaving.is_lease_over():
            pass  # after a suspension: popped jobs are requeued, see below
        elif popped is not None:
            self._start(popped)
        elif is_over:
            # A Redis that died may have popped a job without a reply; or a user moved one by hand.
            for left in self._strays()[:1]:
                self._start(left)
        self._return_strays()
        self._advance_gathering()
        if self._mailbox.is_waiting or not self._is_open() or not self._look():
            return
        if self._gathering is not None and self._take_seat(self._gathering):
            return
        if self._met:
            set_aside = self._store.take_set_aside(self._queue, self._name, self._met)
            if set_aside is not None:
                self._start(set_aside)
        if self._is_open() and not (self._has_others and self._take_from_between()):
            self._mailbox.wait_for_job()

    def _prepare_again(self) -> None:
        """Read the run directories again that could not be read because of a shortage."""
        for attempt in list(self._unprepared):
            if attempt.has_ended:
                self._unprepared.remove(attempt)
            elif attempt.may_have_horse():
                self._unprepared.remove(attempt)
                self.prepare(attempt)

    def _take_from_between(self) -> bool:
        """Start the next of warmd's jobs, while the queue has jobs of other applications."""
        popped, num_others = others.take_from_between(
            self._store.connection, self._queue, self._name
        )
        self._has_others = popped is not None or num_others > 0
        if popped is not None:
            self._start(popped)
        return self._has_others

    def _leave(self, popped: bytes) -> None:
        """Put back a job of another application."""
        if popped not in self._left:
            log.warning(
                "%s: %r: a job of another application in the queue %s, left there: use another "
                "database or Redis for it",
                *(self._name, keys.text(popped)[:80], self._queue),
            )
            self._left.append(popped)
        others.put_back(self._store.connection, popped, self._queue, self._name)
        self._has_others = True

    def _return_strays(self) -> None:
        """Requeue jobs that were popped for this worker although it does not wait for one.

        After a network failure a command may arrive late, when its connection is closed. Without
        this, the job would wait for the end of the running ones while other workers are idle.
        """
        now = time.monotonic()
        if not self._mailbox.is_waiting and not self._is_open() and now - self._listed > _LOOK_S:
            self._listed = now
            if self._strays():
                self.reconcile()

    def _strays(self) -> list[bytes]:
        """The jobs that were popped for this worker, but for the one that gathers nodes."""
        gathering = self._gangs.gatherer.gathering
        own = None if gathering is None else gathering.popped
        return [popped for popped in self._held.registry.taken(self._name) if popped != own]

    def _look(self) -> bool:
        """Return whether jobs may be taken; once per second, check for jobs that are set aside."""
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked = now
            may_take, self._met, self._gathering = self._store.waiting_needs(
                self._queue, self._offer
            )
            if may_take != self.may_take:
                state = "take jobs again" if may_take else "suspended by `rq suspend`"
                log.info("%s: workers %s", self._name, state)
            self.may_take = may_take
        return self.may_take

    def _is_open(self) -> bool:
        is_leaving = self._leaving.is_leaving() or self._leaving.is_lease_over()
        return self._held.has_room() and not is_leaving

    def _has_model(self, path: str) -> bool:
        return model_folders.is_here(self._held.home.runs, path)

    def _start(self, popped: bytes) -> None:
        if others.among(self._store.connection, [popped]):
            self._leave(popped)
            return
        needs = self._store.needs_of_popped(popped)
        missing = self._offer.unmet(needs)
        if not missing and num_nodes(needs) > 1 and self._is_readable(keys.text(popped)):
            if self._gangs.gatherer.gather(popped, needs):
                return
            missing = {NODES: needs[NODES]}  # another job gathers since just now
        if missing and self._store.set_aside(popped, self._queue, self._name, needs):
            job_id = keys.text(popped)
            log.info("%s: %s: set aside, it needs %s", job_id, self._name, line_of(missing))
            return
        self._begin(popped)

    def _is_readable(self, job_id: str) -> bool:
        """Whether the job has a spec. Nodes would not gather for one without: it fails instead."""
        try:
            RunDir.open(self._held.home.runs, job_id).read_spec()
        except WarmdError:
            return False
        return True

    def _begin(self, popped: bytes, gathering: Gathering | None = None) -> None:
        """Begin an execution of a popped job. `gathering`: the nodes that came for it."""
        taken = self._store.begin(popped, self._queue, self._name)
        if taken is None:
            if gathering is not None:
                self._gangs.gatherer.dissolve(gathering)
            # Canceled or paused meanwhile; or started, by a Redis that died before it replied.
            self.reconcile()
            return
        job, started = taken
        self._leaving.num_taken += 1
        log.info("%s: %s: execution %d", job.id, self._name, started.number)
        attempt = Attempt(self._store, job, started, self._held.writer)
        self._held.attempts.append(attempt)
        if self._held.stored is None:
            self.prepare(attempt)
        else:
            self._held.stored.begin(attempt)
            attempt.apply(started.control)
        if gathering is not None:
            self._gangs.led.lead(attempt, gathering)

    def _advance_gathering(self) -> None:
        """Begin the job for which all nodes have come; set it aside if they did not in time."""
        if self._leaving.is_leaving():
            if self._gangs.gatherer.gathering is not None:
                self.reconcile()  # other nodes may have time
            return
        found = self._gangs.gatherer.gathered()
        if found is None:
            return
        gathering, is_whole = found
        if is_whole:
            self._begin(gathering.popped, gathering)
            return
        popped, joined = gathering.popped, gathering.num_joined
        needs = self._store.needs_of_popped(popped)
        if joined < 0 or not self._store.set_aside(popped, self._queue, self._name, needs):
            self.reconcile()  # canceled or paused meanwhile; or this machine was suspended
            return
        came = f"{joined + 1} of {num_nodes(needs)} nodes came"
        log.info("%s: %s: set aside, %s", gathering.job_id, self._name, came)
        self._gangs.gatherer.warn(gathering, self._held.home.runs, self._held.writer)

    def _take_seat(self, job_id: str) -> bool:
        """Take part in a job that gathers nodes, if it needs this one."""

        def request(job: Job) -> RunJob:
            rundir = RunDir.open(self._held.home.runs, job.id)
            offset_s = self._store.shared_clock.offset_s()
            return request_of(rundir, self._name, self._held.config, job, 0, offset_s)

        seat = self._gangs.seats.take(job_id, self._offer.labels, request)
        if seat is None:
            return False
        if seat.is_downloading and seat.request.model is not None:
            self._held.downloads.add(seat.request.model.config, seat)
        return True

    def prepare(self, attempt: Attempt) -> None:
        """Read the run directory of a started job, which is on this machine.

        If Redis goes away meanwhile, the job is queued again.
        """
        job, started = attempt.job, attempt.started
        try:
            prepared = prepare(
                *(self._store, self._held.home.runs, self._name, self._held.config, job, started),
                is_shared=self._held.is_shared,
            )
            if prepared.rundir is not None and not attempt.has_rundir:
                attempt.set_rundir(prepared.rundir)
            attempt.restore_events()
        except redis.RedisError as error:
            log.warning("%s: %s: not prepared: %s", job.id, self._name, error)
            attempt.release()
            return
        except (WarmdError, OSError) as error:
            if shortage(error) is None:
                raise
            attempt.run_again_after(error)
            self._unprepared.append(attempt)
            return
        attempt.prepare(prepared.request)
        if prepared.result is not None:
            attempt.finish_from_disk(prepared.result)
        elif prepared.missing_model is not None:
            path = prepared.missing_model
            log.info("%s: %s: set aside, no model folder %s here", job.id, self._name, path)
            self._leaving.num_taken -= 1
            attempt.set_aside(path, machine_name())
        elif prepared.failure is not None:
            attempt.fail(prepared.failure)
        else:
            attempt.apply(started.control)
            request = attempt.request
            if attempt.is_downloading and request is not None and request.model is not None:
                self._held.downloads.add(request.model.config, attempt)
