"""A worker: takes jobs from one queue and supervises the horses that run them.

It holds no model and imports no torch: the zygote forks the horses, and the worker has a
connection to each. RQ's own worker class is not used: all its workers share one hand-off list, its
stop command is received by a thread that can lose messages, and it fails jobs that were silent for
seven minutes, for example on a laptop that was suspended.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from ...configs.config import WorkerConfig
from ...configs.labels import (
    NODES,
    SCHEMA as SCHEMA_LABEL,
    Labels,
    line_of,
    num_nodes,
    of_node,
    unmet,
)
from ...configs.queues import TRAIN
from ..host.downloads import Downloads
from ..host.heartbeat import Heartbeat
from ..host.home import Home
from ..host.machine import machine_name, node_name
from ..host.messages import (
    ChildReady,
    GangListening,
    GangMet,
    JobActivity,
    JobEvent,
    JobOutcome,
    JobsHeld,
    RunJob,
    WorkerSettings,
    decode,
    encode,
)
from ..host.parent_death import end_with_parent
from ..queue import keys
from ..queue.clocks import clock
from ..queue.jobs import Job, JobStore
from ..queue.lease import RENEWALS, Lease
from ..queue.mailbox import Mailbox
from ..queue.rq_workers import WorkerState
from ..queue.set_aside import Offer
from ..queue.stream import StreamWriter
from ..queue.workers import WorkerRegistry
from ..runs.rundir import SCHEMA, RunDir
from ..store.bucket import Bucket
from . import model_folders
from .attempt import Attempt
from .gangs import GangWork, Gathering
from .horse_pool import Horse, HorsePool
from .preparation import prepare, request_of
from .seat import Seat
from .stored_runs import StoredRuns

log = logging.getLogger(__name__)

_TICK_S = 0.25  # maximum duration of one wait; messages end it earlier
_LOOK_S = 1.0  # between two checks for jobs that were set aside
_RETRY_S = 0.02  # the same while a job waits for a zygote
_RECONNECT_S = 0.2  # minimum time between two attempts to reach Redis
_MOST_REPORTED = 32  # jobs in one report: a longer report is not written atomically
_DRAIN_TIMEOUT_S = 1.0  # for Redis to come back when the worker is to end


class Worker:
    """One worker process: a loop over its horses, Redis, and timers."""

    def __init__(
        self,
        home: Home,
        url: str,
        config: WorkerConfig,
        name: str,
        *,
        is_shared: bool,
        lease_s: float,
        labels: Labels,
        max_jobs: int | None,
        gang_wait_s: float = 60.0,
        bucket: Bucket | None = None,
    ) -> None:
        """`is_shared`: workers of other daemons may take this worker's jobs when its lease ends.

        `labels`: jobs that need others are set aside. `max_jobs`: after these the worker closes.
        `gang_wait_s`: how long a job of several nodes waits for the others.
        `bucket`: where run directories are kept; None: in the folder `runs` of the home.

        A Redis that does not reply within `lease_s` / RENEWALS counts as down. Horses and timers
        wait for that long.
        """
        self.home = home
        self.config = config
        self.name = name
        self.connection = keys.connect_once(url, timeout_s=lease_s / RENEWALS)
        self.store = JobStore(self.connection)
        self.registry = WorkerRegistry(self.store)
        self.horses = HorsePool(home.zygote_socket, config)
        self.attempts: list[Attempt] = []
        self.draining = False  # jobs save and are requeued
        self.closing = False  # jobs run to their end, and no more are taken
        self._writer = StreamWriter(self.connection)
        self._mailbox = Mailbox(self.connection, config.queue, name)
        self._downloads = Downloads()
        self._lease = Lease(url, name, config.queue, length_s=lease_s)
        self._is_shared = is_shared
        self._stored = None if bucket is None else StoredRuns(home, bucket)
        self._has_given_back = False  # all jobs, since the lease ran out
        takes_part = config.queue == TRAIN and config.isolation == "fork"
        gang_labels = labels if takes_part else {}
        self.gangs = GangWork(self.store, name, node_name(home), gang_labels, wait_s=gang_wait_s)
        self._offer = Offer(
            {**labels, SCHEMA_LABEL: str(SCHEMA)}, self._has_model, self.gangs.may_gather
        )
        self._gathering: str | None = None  # the job that gathers nodes, as of the latest check
        self._max_jobs = max_jobs
        self._num_taken = 0
        self._num_ended: Counter[str] = Counter()  # by how they ended
        self._reported = JobsHeld([], 0)
        self._may_take = True  # as of the latest check: workers are not suspended
        self._met: list[str] = []  # needs for which jobs may be set aside, met by the labels
        self._looked = 0.0
        self._listed = 0.0  # time of the latest check for jobs that were popped for it
        self._checked = 0.0
        self._down_since: float | None = clock() - _RECONNECT_S  # None while Redis is reachable
        self._saved_at = 0.0  # when the last job ended whose end is not in Redis yet

    def work(self) -> None:
        """Take and run jobs until SIGTERM; then requeue the running ones and return.

        After SIGUSR1 it takes no more jobs, and returns when the running ones have ended.
        """
        signal.signal(signal.SIGTERM, self._drain)
        signal.signal(signal.SIGUSR1, self._close)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent = os.getppid()
        heartbeat = Heartbeat()
        is_ready = False
        self._lease.start()
        while os.getppid() == parent:
            heartbeat.send_if_due()
            try:
                self._use_redis()
            except redis.RedisError as error:
                log.warning("%s: Redis is unreachable: %s", self.name, error)
                self._disconnect()
            if self._down_since is None and not is_ready:
                is_ready = True
                log.info("%s: listening on %s", self.name, self.config.queue)
                os.write(1, encode(ChildReady()))
            self._report_jobs()
            if (self.draining and self._is_done()) or self._has_closed():
                break
            self._run_timers()
            self._wait()
        self._lease.end()
        self._mailbox.close()
        with suppress(redis.RedisError):  # then the supervisor does it, now or at its next start
            if self._down_since is None:
                self.registry.requeue_orphans(self.name, self.config.queue)

    def _drain(self, *_: Any) -> None:
        self.draining = True

    def _close(self, *_: Any) -> None:
        self.closing = True

    def _is_closing(self) -> bool:
        """Whether it takes no more jobs: on request, or as it has taken its number of them."""
        return self.closing or (self._max_jobs is not None and self._num_taken >= self._max_jobs)

    def _has_closed(self) -> bool:
        """Whether it closes, and neither runs a job nor may receive another one."""
        is_idle = not self.attempts and not self.gangs.seats and not self._mailbox.is_waiting
        return self._is_closing() and is_idle and self._down_since is None

    def _report_jobs(self) -> None:
        """Report to the supervisor, and to RQ's records, which jobs it holds."""
        self._lease.state = WorkerState(
            job=self.attempts[0].job.id if self.attempts else None,
            is_suspended=not self._may_take,
            finished=self._num_ended["finished"],
            failed=self._num_ended["failed"],
        )
        taken: list[Attempt | Seat] = [*self.attempts, *self.gangs.seats]
        held = [one.job.id for one in taken[:_MOST_REPORTED]]
        now = JobsHeld(held, self._num_taken)
        if now != self._reported:
            with suppress(BlockingIOError, BrokenPipeError):  # then the next iteration tries again
                os.write(1, encode(now))
                self._reported = now

    def _is_done(self) -> bool:
        """Whether nothing is left to do, or nothing that can be done without Redis.

        Jobs whose end Redis did not receive stay started there. They are requeued later, and
        resume from their last checkpoint or finish with the result on disk.
        """
        is_up = self._down_since is None
        has_seat = any(is_up or seat.settle is None for seat in self.gangs.seats)
        if self._down_since is None or not self.attempts:
            return not self.attempts and not has_seat
        if any(attempt.settle is None for attempt in self.attempts):
            self._saved_at = clock()
            return False
        return clock() - max(self._down_since, self._saved_at) > _DRAIN_TIMEOUT_S

    # --- Redis ------------------------------------------------------------------------------

    def _use_redis(self) -> None:
        """Do everything that needs Redis. Raises RedisError."""
        self._writer.flush()
        if self._down_since is not None:
            if not self._is_back(self._down_since):
                return
            self._writer.is_redis_down = False
            self._reconcile()
            self._down_since = None
        for attempt in list(self.attempts):
            if attempt.settle is not None and self._may_settle(attempt):
                attempt.settle()
                self.gangs.settled(attempt)
                self.attempts.remove(attempt)
                self._num_ended[attempt.ended or "other"] += 1
        self.gangs.advance(is_stopping=self.draining, is_closing=self._is_closing())
        now = time.monotonic()
        if self._mailbox.has_control_request() or now - self._checked > _TICK_S:
            self._checked = now
            self._apply_control_requests()
        self._take_job()

    def _may_settle(self, attempt: Attempt) -> bool:
        """Whether other nodes have ended the execution, and the run store has all its files.

        Without its lease the worker does not wait: others may have the job.
        """
        is_stored = self._stored is None or self._stored.end(attempt)
        return (is_stored and self.gangs.may_settle(attempt)) or self._has_given_back

    def _disconnect(self) -> None:
        """Stop using Redis until the lease thread reaches it again: every command may block."""
        self._mailbox.close()
        self._writer.is_redis_down = True
        self._down_since = clock()
        self._lease.renew_soon()

    def _is_back(self, down_since: float) -> bool:
        renewed_at = self._lease.renewed_at
        is_renewed = renewed_at is not None and renewed_at > down_since
        return is_renewed and clock() > down_since + _RECONNECT_S

    def _reconcile(self) -> None:
        """Requeue the jobs that this worker holds in Redis and does not run.

        Redis may have made a change and died before it replied.
        """
        self.gangs.drop_gathering()
        spare = [attempt.started.claim for attempt in self.attempts]
        for job_id in self.registry.reclaim(self.name, self.config.queue, spare=spare):
            log.warning("%s: requeued, %s does not run it", job_id, self.name)

    def _apply_control_requests(self) -> None:
        """Apply the stop and pause requests that Redis has for the running jobs."""
        running = [a for a in self.attempts if a.settle is None or not a.is_stored]
        if running:
            found = self.store.control_requests([(a.job, a.started.claim) for a in running])
            for attempt, control in zip(running, found, strict=True):
                attempt.apply(control)
                attempt.catch_up()

    def _take_job(self) -> None:
        """Start the next job if there is a free slot."""
        is_over, popped = self._mailbox.job()
        if self._is_lease_over():
            pass  # after a suspension: what was popped goes back, see below
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
            set_aside = self.store.take_set_aside(self.config.queue, self.name, self._met)
            if set_aside is not None:
                self._start(set_aside)
        if self._is_open():
            self._mailbox.wait_for_job()

    def _return_strays(self) -> None:
        """Give back jobs that were popped for this worker and that it does not wait for.

        A network that was cut delivers a command late, after its connection was closed. Without
        this, the job would wait for the end of the running ones while other workers are idle.
        """
        now = time.monotonic()
        if not self._mailbox.is_waiting and not self._is_open() and now - self._listed > _LOOK_S:
            self._listed = now
            if self._strays():
                self._reconcile()

    def _strays(self) -> list[bytes]:
        """The jobs that were popped for this worker, but for the one that gathers nodes."""
        gathering = self.gangs.gathering
        own = None if gathering is None else gathering.popped
        return [popped for popped in self.registry.taken(self.name) if popped != own]

    def _look(self) -> bool:
        """Return whether jobs may be taken; once per second, check for jobs that are set aside."""
        now = time.monotonic()
        if now - self._looked > _LOOK_S:
            self._looked = now
            may_take, self._met, self._gathering = self.store.waiting_needs(
                self.config.queue, self._offer
            )
            if may_take != self._may_take:
                state = "take jobs again" if may_take else "suspended by `rq suspend`"
                log.info("%s: workers %s", self.name, state)
            self._may_take = may_take
        return self._may_take

    def _is_open(self) -> bool:
        is_leaving = self.draining or self._is_closing()
        return self._has_room() and not is_leaving and not self._is_lease_over()

    def _has_room(self) -> bool:
        # Suspects without a horse take no slot.
        # Nor do ended jobs whose files are being uploaded.
        slots = [a for a in self.attempts if a.settle is None or a.is_stored]
        running = sum(not (a.is_suspect and a.horse is None) for a in slots)
        taken = running + self.gangs.num_slots + self.horses.num_leaving
        return taken < self.config.slots

    def _has_model(self, path: str) -> bool:
        return model_folders.is_here(self.home.runs, path)

    def _start(self, popped: bytes) -> None:
        needs = self.store.needs_of_popped(popped)
        missing = self._offer.unmet(needs)
        if not missing and num_nodes(needs) > 1:
            if self.gangs.gather(popped, needs):
                return
            missing = {NODES: needs[NODES]}  # another job gathers since just now
        if missing and self.store.set_aside(popped, self.config.queue, self.name, needs):
            job_id = keys.text(popped)
            log.info("%s: %s: set aside, it needs %s", job_id, self.name, line_of(missing))
            return
        self._begin(popped)

    def _begin(self, popped: bytes, gathering: Gathering | None = None) -> None:
        """Begin an execution of a popped job. `gathering`: the nodes that came for it."""
        taken = self.store.begin(popped, self.config.queue, self.name)
        if taken is None:
            if gathering is not None:
                self.gangs.dissolve(gathering)
            # Canceled or paused meanwhile; or started, by a Redis that died before it replied.
            self._reconcile()
            return
        job, started = taken
        self._num_taken += 1
        log.info("%s: %s: execution %d", job.id, self.name, started.number)
        attempt = Attempt(self.store, job, started, None, None, self._writer)
        self.attempts.append(attempt)
        if self._stored is None:
            self._prepare(attempt)
        else:
            self._stored.begin(attempt)
            attempt.apply(started.control)
        if gathering is not None:
            self.gangs.lead(attempt, gathering)

    def _advance_gathering(self) -> None:
        """Begin the job for which all nodes have come; set it aside if they did not in time."""
        if self.draining or self._is_closing():
            if self.gangs.gathering is not None:
                self._reconcile()  # other nodes may have time
            return
        found = self.gangs.gathered()
        if found is None:
            return
        gathering, is_whole = found
        if is_whole:
            self._begin(gathering.popped, gathering)
            return
        popped, needs, joined = gathering.popped, gathering.needs, gathering.num_joined
        if joined < 0 or not self.store.set_aside(popped, self.config.queue, self.name, needs):
            self._reconcile()  # canceled or paused meanwhile; or this machine was suspended
            return
        came = f"{joined + 1} of {num_nodes(needs)} nodes came"
        log.info("%s: %s: set aside, %s", gathering.job_id, self.name, came)
        self.gangs.warn(gathering, self.home.runs, self._writer)

    def _take_seat(self, job_id: str) -> bool:
        """Take part in a job that gathers nodes, if it needs this one."""

        def request(job: Job) -> RunJob:
            rundir = RunDir.open(self.home.runs, job.id)
            offset_s = self.store.shared_clock.offset_s()
            return request_of(rundir, self.name, self.config, job, 0, offset_s)

        needs = self.store.needs_of_popped(job_id.encode())
        if unmet(of_node(needs), self._offer.labels):
            return False
        seat = self.gangs.take_seat(job_id, request)
        if seat is None:
            return False
        self._num_taken += 1
        if seat.is_downloading and seat.request.model is not None:
            self._downloads.add(seat.request.model.config, seat)
        return True

    def _prepare(self, attempt: Attempt) -> None:
        """Read the run directory of a started job, which is on this machine."""
        job, started = attempt.job, attempt.started
        prepared = prepare(
            *(self.store, self.home.runs, self.name, self.config, job, started),
            is_shared=self._is_shared,
        )
        request = attempt.request = prepared.request
        if prepared.rundir is not None and not attempt.has_rundir:
            attempt.set_rundir(prepared.rundir)
        if prepared.result is not None:
            attempt.finish_from_disk(prepared.result)
        elif prepared.missing_model is not None:
            path = prepared.missing_model
            log.info("%s: %s: set aside, no model folder %s here", job.id, self.name, path)
            self._num_taken -= 1
            attempt.set_aside(path, machine_name())
        elif prepared.failure is not None:
            attempt.fail(prepared.failure)
        else:
            attempt.apply(started.control)
            if attempt.is_downloading and request is not None and request.model is not None:
                self._downloads.add(request.model.config, attempt)

    # --- horses -----------------------------------------------------------------------------

    def _wait(self) -> None:
        """Wait for messages from horses, downloads and Redis, for one tick at most; handle them."""
        is_waiting = any(self._needs_horse(attempt) for attempt in self.attempts)
        is_waiting = is_waiting or any(seat.needs_horse for seat in self.gangs.seats)
        is_urgent = any(
            a.settle is not None and a.is_stored and not self.gangs.is_ending(a)
            for a in self.attempts
        ) or any(seat.settle is not None for seat in self.gangs.seats)
        timeout_s = 0.0 if is_urgent and self._down_since is None else _TICK_S
        horses = {horse.channel.fileno(): horse for horse in self.horses.horses}
        downloads = self._downloads.channels()
        sources = [*horses, *downloads, *self._mailbox.sockets()]
        readable, _, _ = select.select(sources, [], [], _RETRY_S if is_waiting else timeout_s)
        for source in readable:
            if source in horses:
                self._receive(horses[source])
            elif source in downloads:
                self._downloads.read(source)
        self.horses.sweep()  # at once, so that a free slot is filled without a pause

    def _receive(self, horse: Horse) -> None:
        every: list[Attempt | Seat] = [*self.attempts, *self.gangs.seats]
        attempts = {one.job.id: one for one in every if one.job.id in horse.job_ids}
        for message in horse.receive():
            # The zygote's Failure names no job: it replies to the request for this horse.
            if isinstance(message, JobEvent | JobActivity | JobOutcome | GangListening | GangMet):
                attempt = attempts.get(message.job)
            else:
                attempt = attempts.get(horse.requested_for)
            if attempt is None:
                continue
            attempt.handle(message)
            if attempt.settle is not None:
                del attempts[attempt.job.id]
                horse.job_ids.remove(attempt.job.id)
                if not horse.is_resident:
                    horse.leave()
        if horse.instead is not None:
            self._hand_over(horse, list(attempts.values()))
        elif horse.channel.closed_by_peer:
            for attempt in attempts.values():
                if horse.has_started or attempt.job.id == horse.requested_for:
                    attempt.conclude_death(is_shared=len(attempts) > 1)
                else:
                    attempt.detach()
            horse.job_ids.clear()

    def _hand_over(self, horse: Horse, attempts: list[Attempt | Seat]) -> None:
        """Give the jobs of a horse that the zygote did not fork to the one that has their model."""
        other = self.horses.hand_over(horse)
        for attempt in attempts:
            if other is None:
                attempt.detach()  # the next step requests a horse again
            else:
                attempt.horse = other

    def _run_timers(self) -> None:
        """Check time limits, stalls and the lease, and request horses for jobs without one."""
        self._enforce_lease()
        if self._stored is not None:
            for attempt in self._stored.advance(self.attempts):
                self._prepare(attempt)
        for attempt in self.attempts:
            if self.draining:
                attempt.stop("drain")
            attempt.check_time_limit()
            attempt.check_progress()
            if self._needs_horse(attempt) and attempt.request is not None:
                attempt.horse = self.horses.attach(attempt.request, alone=attempt.is_suspect)
        for seat in self.gangs.seats:
            if seat.needs_horse:
                seat.horse = self.horses.attach(seat.request, alone=True)
        self._downloads.sweep()

    def _enforce_lease(self) -> None:
        """End all jobs before the lease runs out: after that, other machines may take them."""
        is_over = self._is_lease_over()
        if is_over and self.attempts and not self._has_given_back:
            log.error(
                "%s: could not renew its lease for %g s: ending its jobs, other workers may take "
                "them",
                self.name,
                self._lease.usable_s,
            )
        if is_over:
            for attempt in self.attempts:
                attempt.give_back()  # in every tick: a horse may have been forked just now
            self.gangs.give_back()
        self._has_given_back = is_over

    def _is_lease_over(self) -> bool:
        return self._is_shared and self._lease.is_running_out()

    def _needs_horse(self, attempt: Attempt) -> bool:
        """Whether a job is to get a horse now. Suspects get one at a time."""
        if attempt.horse is not None or attempt.settle is not None or attempt.is_downloading:
            return False
        if not attempt.is_suspect:
            return True
        suspects = [other for other in self.attempts if other.is_suspect and other.settle is None]
        return not any(other.horse is not None for other in suspects) and suspects[0] is attempt


def main() -> None:
    """Run as `python -m warmd.daemon.work.worker HOME PARENT`; reads WorkerSettings from stdin."""
    end_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = decode(sys.stdin.buffer.read())
    assert isinstance(settings, WorkerSettings)
    Worker(
        Home(Path(sys.argv[1])),
        settings.url,
        settings.config,
        settings.name,
        is_shared=settings.is_shared,
        lease_s=settings.lease_s,
        labels=settings.labels,
        max_jobs=settings.max_jobs,
        gang_wait_s=settings.gang_wait_s,
        bucket=None if settings.runs is None else Bucket(settings.runs),
    ).work()


if __name__ == "__main__":
    main()
