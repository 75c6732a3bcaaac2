"""A worker: the loop over its jobs (taking.py), their horses (horses.py), Redis and timers.

It holds no model and imports no torch: the zygote forks the horses, and the worker has a
connection to each. RQ's own worker class is not used: all its workers share one hand-off list, its
stop command is received by a thread that can lose messages, and it fails jobs that were silent for
seven minutes, for example on a laptop that was suspended.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import redis

from ...configs.config import WorkerConfig
from ...configs.labels import Labels
from ...jobs.errors import WarmdError
from ...jobs.files.shortage import Shortage, shortage
from ..host.heartbeat import Heartbeat
from ..host.home import Home
from ..host.machine import node_name
from ..host.messages import ChildReady, JobsHeld, WorkerSettings, decode, encode
from ..host.parent_death import end_with_parent
from ..queue import keys
from ..queue.clocks import clock
from ..queue.jobs import JobStore
from ..queue.mailbox import Mailbox
from ..queue.rq_workers import WorkerState
from ..queue.stream import StreamWriter
from ..queue.workers import RENEWALS, Lease, WorkerRegistry
from ..store.bucket import Bucket
from .attempt import Attempt
from .gangs import GangWork
from .held import Held, Leaving
from .horses import TICK_S, Horses
from .stored_runs import StoredRuns
from .taking import JobTaker

log = logging.getLogger(__name__)

_RECONNECT_S = 0.2  # minimum time between two attempts to reach Redis
_MOST_REPORTED = 32  # jobs in one report: a longer report is not written atomically


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
        self.connection = keys.connect_once(url, timeout_s=lease_s / RENEWALS)
        store = JobStore(self.connection)
        gang_labels = labels if config.takes_part else {}
        held = self._held = Held(
            home=home,
            config=config,
            name=name,
            is_shared=is_shared,
            store=store,
            registry=WorkerRegistry(store),
            writer=StreamWriter(self.connection),
            mailbox=Mailbox(self.connection, config.queue, name),
            lease=Lease(url, name, config.queue, length_s=lease_s),
            stored=None if bucket is None else StoredRuns(home, bucket),
            gangs=GangWork(store, name, node_name(home), gang_labels, wait_s=gang_wait_s),
        )
        self._leaving = Leaving(held, max_jobs=max_jobs)
        self._taker = JobTaker(held, self._leaving, labels)
        self._horses = Horses(held)
        self._num_ended: Counter[str] = Counter()  # by how they ended
        self._reported = JobsHeld([], 0)
        self._lacking: Shortage | None = None  # what it last lacked itself; logged once
        self._checked = 0.0
        self._down_since: float | None = clock() - _RECONNECT_S  # None while Redis is reachable

    def work(self) -> None:
        """Take and run jobs until SIGTERM; then requeue the running ones and return.

        After SIGUSR1 it takes no more jobs, and returns when the running ones have ended.
        """
        self._leaving.catch_signals()
        parent = os.getppid()
        heartbeat = Heartbeat()
        is_ready = False
        self._held.lease.start()
        while os.getppid() == parent:
            heartbeat.send_if_due()
            try:
                self._use_redis()
            except redis.RedisError as error:
                log.warning("%s: Redis is unreachable: %s", self._held.name, error)
                self._disconnect()
            except (OSError, WarmdError) as error:
                lacking = shortage(error)
                if lacking is None:
                    raise
                if lacking != self._lacking:
                    log.error("%s: lacks %s: %s", self._held.name, lacking.what, error)
                self._lacking = lacking
            if self._down_since is None and not is_ready:
                is_ready = True
                log.info("%s: listening on %s", self._held.name, self._held.config.queue)
                os.write(1, encode(ChildReady()))
            self._report_jobs()
            if self._may_end():
                break
            self._run_timers()
            self._horses.wait(is_redis_up=self._down_since is None)
        self._held.lease.end()
        self._held.mailbox.close()
        with suppress(redis.RedisError):  # then the supervisor does it, now or at its next start
            if self._down_since is None:
                self._held.gangs.gatherer.drop()
                self._held.registry.requeue_orphans(self._held.name, self._held.config.queue)

    def _may_end(self) -> bool:
        leaving, down_since = self._leaving, self._down_since
        if leaving.draining and leaving.is_done(down_since):
            return True
        return down_since is None and leaving.has_closed()

    def _report_jobs(self) -> None:
        """Report to the supervisor, and to RQ's records, which jobs it holds."""
        self._held.lease.state = WorkerState(
            job=self._held.attempts[0].job.id if self._held.attempts else None,
            is_suspended=not self._taker.may_take,
            finished=self._num_ended["finished"],
            failed=self._num_ended["failed"],
        )
        ids = [one.job.id for one in self._held.taken[:_MOST_REPORTED]]
        now = JobsHeld(ids, self._leaving.num_jobs)
        if now != self._reported:
            with suppress(BlockingIOError, BrokenPipeError):  # then the next iteration tries again
                os.write(1, encode(now))
                self._reported = now

    # --- Redis ------------------------------------------------------------------------------

    def _use_redis(self) -> None:
        """Do everything that needs Redis. Raises RedisError."""
        self._held.writer.flush()
        if self._down_since is not None:
            if not self._is_back(self._down_since):
                return
            self._held.writer.is_redis_down = False
            self._taker.reconcile()
            self._down_since = None
        for attempt in list(self._held.attempts):
            if attempt.settle is not None and self._may_settle(attempt):
                attempt.settle()
                self._held.gangs.led.settled(attempt)
                self._held.attempts.remove(attempt)
                self._num_ended[attempt.ended or "other"] += 1
        self._held.gangs.advance(
            is_stopping=self._leaving.draining, is_closing=self._leaving.is_closing()
        )
        for attempt in self._held.attempts:
            attempt.report_wait()
        now = time.monotonic()
        if self._held.mailbox.has_control_request() or now - self._checked > TICK_S:
            self._checked = now
            self._apply_control_requests()
        self._taker.take()

    def _may_settle(self, attempt: Attempt) -> bool:
        """Whether other nodes have ended the execution, and the run store has all its files.

        Without its lease the worker does not wait: others may have the job.
        """
        is_stored = self._held.stored is None or self._held.stored.end(attempt)
        return (
            is_stored and attempt.may_settle() and self._held.gangs.led.may_settle(attempt)
        ) or self._leaving.has_given_back

    def _disconnect(self) -> None:
        """Stop using Redis until the lease thread reaches it again: every command may block."""
        self._held.mailbox.close()
        self._held.writer.is_redis_down = True
        self._down_since = clock()
        self._held.lease.renew_soon()

    def _is_back(self, down_since: float) -> bool:
        renewed_at = self._held.lease.renewed_at
        is_renewed = renewed_at is not None and renewed_at > down_since
        return is_renewed and clock() > down_since + _RECONNECT_S

    def _apply_control_requests(self) -> None:
        """Apply the stop and pause requests that Redis has for the running jobs."""
        running = [a for a in self._held.attempts if not a.has_ended or not a.is_stored]
        if running:
            found = self._held.store.control_requests([(a.job, a.started.claim) for a in running])
            for attempt, control in zip(running, found, strict=True):
                attempt.apply(control)
                attempt.catch_up()

    def _run_timers(self) -> None:
        """Check time limits, stalls and the lease, and request horses for jobs without one."""
        self._leaving.enforce_lease()
        if self._held.stored is not None:
            for attempt in self._held.stored.advance(self._held.attempts):
                self._taker.prepare(attempt)
        for attempt in self._held.attempts:
            if self._leaving.draining:
                attempt.stop("drain")
            attempt.check_time_limit()
            attempt.check_progress()
            attempt.check_shortage()
        self._horses.withdraw()
        self._horses.attach()
        self._held.downloads.sweep()


def main() -> None:
    """Run as `python -m warmd.daemon.work.worker HOME PARENT`; reads WorkerSettings from stdin."""
    end_with_parent(int(sys.argv[2]))
    datetime.strptime("2026", "%Y")  # imports a module, for which no descriptor may be free later
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
