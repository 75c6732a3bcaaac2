"""A worker: takes jobs from one queue and watches over the horses that run them.

It holds no model and imports no torch: the zygote forks the horses, the worker has a line to each.
RQ's own worker class is not used: its hand-off list is shared, its stop comes over a thread that
loses messages, and it fails what was quiet for seven minutes, such as a laptop that slept.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import redis

from ...configs.config import ModelConfig, WorkerConfig
from ...jobs.errors import Conflict, NotFound, WarmdError
from ..host import fetch
from ..host.downloads import Downloads
from ..host.heartbeat import Beat
from ..host.home import Home
from ..host.parent_death import end_with_parent
from ..queue import adoption, keys
from ..queue.jobs import Begun, Job, JobStore
from ..queue.lease import RENEWALS, Lease, clock
from ..queue.mailbox import Mailbox
from ..queue.stream import Outbox
from ..queue.workers import Roster
from ..runs.rundir import RunDir
from .attempt import Attempt
from .horse_pool import Horse, Stable

log = logging.getLogger(__name__)

_TURN_S = 0.25  # at most; a horse, a job or an order ends it sooner
_HURRY_S = 0.02  # the same while there is no zygote to fork a horse
_AWAY_S = 0.2  # at least, before a server that was away is asked again
_PATIENCE_S = 1.0  # of a worker that is to end, with a server that is away


class Worker:
    """One worker process: a loop over its horses, the server's word, and the clock."""

    def __init__(
        self,
        home: Home,
        url: str,
        config: WorkerConfig,
        name: str,
        *,
        is_shared: bool,
        lease_s: float,
    ) -> None:
        """`is_shared`: workers of other daemons may take this one's jobs when its lease is over.

        A server that takes longer than a small part of it to reply is away: horses and the clock
        wait as long.
        """
        self.home = home
        self.config = config
        self.name = name
        self.connection = keys.connect_once(url, timeout_s=lease_s / RENEWALS)
        self.store = JobStore(self.connection)
        self.roster = Roster(self.store)
        self.stable = Stable(home.zygote_socket, config)
        self.attempts: list[Attempt] = []
        self.draining = False
        self._outbox = Outbox(self.connection)
        self._mailbox = Mailbox(self.connection, config.queue, name)
        self._downloads = Downloads()
        self._lease = Lease(url, name, config.queue, length_s=lease_s)
        self._is_shared = is_shared
        self._has_given_back = False  # all jobs, since the lease ran out
        self._checked = 0.0
        self._away_since: float | None = clock() - _AWAY_S  # None while the server is there
        self._saved_at = 0.0  # when the last job ended that the server is still to be told of

    def work(self) -> None:
        """Take and run jobs until SIGTERM; then give back those that run, and return."""
        signal.signal(signal.SIGTERM, self._drain)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent = os.getppid()
        beat = Beat()
        is_ready = False
        self._lease.start()
        while os.getppid() == parent:
            beat.sign()
            try:
                self._serve()
            except redis.RedisError as error:
                log.warning("%s: no server: %s", self.name, error)
                self._part_from_server()
            if self._away_since is None and not is_ready:
                is_ready = True
                log.info("%s: listening on %s", self.name, self.config.queue)
                os.write(1, b'{"stage": "ready"}\n')  # to the supervisor
            if self.draining and self._is_done():
                break
            self._attend()
            self._listen()
        self._lease.end()
        self._mailbox.close()
        with suppress(redis.RedisError):  # then the supervisor does so, now or at the next start
            if self._away_since is None:
                self.roster.bury(self.name, self.config.queue)

    def _drain(self, *_: Any) -> None:
        self.draining = True

    def _is_done(self) -> bool:
        """Whether nothing is left to do, or nothing that can be done without the server.

        What Redis was not told of stays started there, and is begun again by whoever comes next:
        from its last checkpoint, or with its result.
        """
        if self._away_since is None or not self.attempts:
            return not self.attempts
        if any(attempt.settle is None for attempt in self.attempts):
            self._saved_at = clock()
            return False
        return clock() - max(self._away_since, self._saved_at) > _PATIENCE_S

    # --- with the server --------------------------------------------------------------------

    def _serve(self) -> None:
        """All that needs the server. Raises RedisError when it is away."""
        self._outbox.send()
        if self._away_since is not None:
            if not self._is_back(self._away_since):
                return
            self._outbox.is_away = False
            self._reconcile()
            self._away_since = None
        for attempt in list(self.attempts):
            if attempt.settle is not None:
                attempt.settle()
                self.attempts.remove(attempt)
        now = time.monotonic()
        if self._mailbox.orders() or now - self._checked > _TURN_S:
            self._checked = now
            self._check()
        self._take()

    def _part_from_server(self) -> None:
        """Ask it nothing until the lease's thread has found it again: each question may hang."""
        self._mailbox.close()
        self._outbox.is_away = True
        self._away_since = clock()
        self._lease.renew_soon()

    def _is_back(self, away_since: float) -> bool:
        renewed_at = self._lease.renewed_at
        is_renewed = renewed_at is not None and renewed_at > away_since
        return is_renewed and clock() > away_since + _AWAY_S

    def _reconcile(self) -> None:
        """Put back what the server says this worker runs and it does not.

        A server that died may have made a change and kept its reply to itself.
        """
        spare = [attempt.begun.claim for attempt in self.attempts]
        for job_id in self.roster.reclaim(self.name, self.config.queue, spare=spare):
            log.warning("%s: queued again, %s had lost it", job_id, self.name)

    def _check(self) -> None:
        """Pass on what is asked of the jobs that run."""
        running = [attempt for attempt in self.attempts if attempt.settle is None]
        if running:
            asked = self.store.orders([(a.job, a.begun.claim) for a in running])
            for attempt, orders in zip(running, asked, strict=True):
                attempt.heed(orders)
                attempt.catch_up()

    def _take(self) -> None:
        """Take up the next job if there is room for it."""
        is_over, popped = self._mailbox.job()
        if popped is not None:
            self._begin(popped)
        elif is_over:
            # A server that died kept its reply to itself, and somebody may have moved one by hand.
            for left in self.roster.taken(self.name)[:1]:
                self._begin(left)
        if self._has_room() and not self.draining:
            self._mailbox.wait_for_job()

    def _has_room(self) -> bool:
        # Suspects that wait for their turn take no place from others.
        running = sum(not (a.is_suspect and a.horse is None) for a in self.attempts)
        return running + self.stable.num_leaving < self.config.slots

    def _begin(self, popped: bytes) -> None:
        taken = self.store.begin(popped, self.config.queue, self.name)
        if taken is None:
            # Canceled or paused meanwhile; or begun, and the server died with its reply unsent.
            self._reconcile()
            return
        job, begun = taken
        log.info("%s: %s: execution %d", job.id, self.name, begun.number)
        rundir = None
        result = None
        request: dict[str, Any] = {}
        failure = None
        try:
            if not self.store.is_ours(job):
                raise NotFound(f"job: {job.id} is not one of warmd's")
            found = RunDir.open(self.home.runs, job.id)
            if adoption.is_foreign(self.store.connection, found):
                raise Conflict(f"job: {job.id} was taken over by another Redis: resume it there")
            rundir = found
            result = rundir.read_result()
            request = self._request(job, begun, rundir)
        except WarmdError as error:
            failure = str(error)
        except Exception as error:  # one spoilt job must not end the worker, and then the daemon
            log.exception("%s: %s", job.id, self.name)
            failure = f"{type(error).__name__}: {error}"
        attempt = Attempt(self.store, job, begun, rundir, request, self._outbox)
        self.attempts.append(attempt)
        if result is not None:
            attempt.recall(result)
        elif failure is not None:
            attempt.fail(failure)
        else:
            attempt.heed(begun.orders)
            if attempt.is_fetching:
                self._downloads.want(ModelConfig(**request["model"]["config"]), attempt)

    def _request(self, job: Job, begun: Begun, rundir: RunDir) -> dict[str, Any]:
        """What a horse is told to do; the model's folder is None as long as it is on a hub only.

        Raises WarmdError.
        """
        model = rundir.read_spec().get("model")
        folder = fetch.folder_at_hand(ModelConfig(**model)) if model is not None else None
        enqueued = job.enqueued_at
        return {
            "op": "run",
            "job_id": job.id,
            "worker": self.name,
            "run_dir": str(rundir.path),
            "execution": begun.number,
            "slots": self.config.slots,
            "threads": self.config.threads,
            "niceness": self.config.niceness,
            "enqueued_at": enqueued.timestamp() if enqueued else None,
            "model": {"config": model, "folder": folder and str(folder)} if model else None,
        }

    # --- with the horses --------------------------------------------------------------------

    def _listen(self) -> None:
        """Wait until somebody has something to say, but not for long."""
        is_stuck = any(self._waits_for_horse(attempt) for attempt in self.attempts)
        is_urgent = any(attempt.settle is not None for attempt in self.attempts)
        timeout_s = 0.0 if is_urgent and self._away_since is None else _TURN_S
        horses = {horse.channel.fileno(): horse for horse in self.stable.horses}
        downloads = self._downloads.channels()
        doors = [*horses, *downloads, *self._mailbox.sockets()]
        readable, _, _ = select.select(doors, [], [], _HURRY_S if is_stuck else timeout_s)
        for door in readable:
            if door in horses:
                self._hear(horses[door])
            elif door in downloads:
                self._downloads.hear(door)

    def _hear(self, horse: Horse) -> None:
        attempts = {a.job.id: a for a in self.attempts if a.job.id in horse.job_ids}
        for message in horse.receive():
            # The zygote names no job: its one reply is to the request that asked for this horse.
            attempt = attempts.get(message.get("job", horse.asked_for))
            if attempt is None:
                continue
            attempt.hear(message)
            if attempt.settle is not None:
                del attempts[attempt.job.id]
                horse.job_ids.remove(attempt.job.id)
                if not horse.is_resident:
                    horse.leave()
        if horse.channel.closed_by_peer:
            for attempt in attempts.values():
                if horse.has_lived or attempt.job.id == horse.asked_for:
                    attempt.conclude_death(had_company=len(attempts) > 1)
                else:
                    attempt.dismount()
            horse.job_ids.clear()

    def _attend(self) -> None:
        """What is due by the clock, and horses for the jobs that have none."""
        self._keep_to_lease()
        for attempt in self.attempts:
            if self.draining:
                attempt.stop("drain")
            attempt.watch_time()
            attempt.watch_progress()
            if self._waits_for_horse(attempt):
                attempt.horse = self.stable.mount(
                    attempt.job.id, attempt.request, alone=attempt.is_suspect
                )
        self._downloads.sweep()
        self.stable.sweep()

    def _keep_to_lease(self) -> None:
        """End all jobs before the lease does: workers of other machines may have them after it."""
        is_over = self._is_shared and self._lease.is_running_out()
        if is_over and self.attempts and not self._has_given_back:
            log.error(
                "%s: could not renew its lease for %g s: ends its jobs, others may take them",
                self.name,
                self._lease.usable_s,
            )
        if is_over:
            for attempt in self.attempts:
                attempt.give_back()  # in every turn: a horse may just have been forked
        self._has_given_back = is_over

    def _waits_for_horse(self, attempt: Attempt) -> bool:
        """Whether it is to have a horse now; suspects have one after the other."""
        if attempt.horse is not None or attempt.settle is not None or attempt.is_fetching:
            return False
        if not attempt.is_suspect:
            return True
        suspects = [other for other in self.attempts if other.is_suspect and other.settle is None]
        return not any(other.horse is not None for other in suspects) and suspects[0] is attempt


def main() -> None:
    """Run as `python -m warmd.daemon.work.worker HOME PARENT`; settings: JSON on stdin."""
    end_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    request = orjson.loads(sys.stdin.buffer.read())
    config = WorkerConfig(**request["config"])
    Worker(
        Home(Path(sys.argv[1])),
        request["url"],
        config,
        request["name"],
        is_shared=request["is_shared"],
        lease_s=request["lease_s"],
    ).work()


if __name__ == "__main__":
    main()
