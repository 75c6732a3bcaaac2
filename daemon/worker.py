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
from pathlib import Path
from typing import Any

import orjson
import redis
from rq.job import Job

from ..configs.config import ModelConfig, WorkerConfig
from ..jobs.errors import NotFound, WarmdError
from . import fetch, keys
from .attempt import Attempt
from .home import Home
from .jobstore import Begun, JobStore
from .leash import end_with_parent
from .mailbox import Mailbox
from .model_files import fingerprint
from .roster import Roster
from .rundir import RunDir
from .stable import Horse, Stable
from .stream import Outbox

log = logging.getLogger(__name__)

LEASE_S = 10  # a worker that was silent this long is dead for the other machines
_TURN_S = 0.25  # at most; a horse, a job or an order ends it sooner
_HURRY_S = 0.02  # the same while there is no zygote to fork a horse
_RENEW_S = 2.0
_AWAY_S = 0.2  # between two tries to reach a server that is away


class Worker:
    """One worker process: a loop over its horses, the server's word, and the clock."""

    def __init__(self, home: Home, url: str, config: WorkerConfig, name: str) -> None:
        self.home = home
        self.config = config
        self.name = name
        self.connection = keys.connect(url, timeout_s=30.0)
        self.store = JobStore(self.connection)
        self.roster = Roster(self.store)
        self.stable = Stable(home.zygote_socket, config)
        self.attempts: list[Attempt] = []
        self.draining = False
        self._outbox = Outbox(self.connection)
        self._mailbox = Mailbox(self.connection, config.queue, name)
        self._renewed = 0.0
        self._checked = 0.0
        self._away_until: float | None = 0.0  # None while the server is there

    def work(self) -> None:
        """Take and run jobs until SIGTERM; then give back those that run, and return."""
        signal.signal(signal.SIGTERM, self._drain)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        parent = os.getppid()
        is_ready = False
        while os.getppid() == parent:
            try:
                self._serve()
            except redis.RedisError as error:
                log.warning("%s: no server: %s", self.name, error)
                self._mailbox.close()
                self._away_until = time.monotonic() + _AWAY_S
            if self._away_until is None and not is_ready:
                is_ready = True
                log.info("%s: listening on %s", self.name, self.config.queue)
                os.write(1, b'{"stage": "ready"}\n')  # to the supervisor
            if self.draining and not self.attempts:
                break
            self._attend()
            self._listen()
        self._mailbox.close()
        while True:
            try:
                self.roster.bury(self.name, self.config.queue)
                return
            except redis.RedisError:
                time.sleep(_AWAY_S)

    def _drain(self, *_: Any) -> None:
        self.draining = True

    # --- with the server --------------------------------------------------------------------

    def _serve(self) -> None:
        """All that needs the server. Raises RedisError when it is away."""
        self._outbox.send()
        if self._away_until is not None:
            if time.monotonic() < self._away_until:
                return
            self._put_right()
            self._away_until = None
        for attempt in list(self.attempts):
            if attempt.settle is not None:
                attempt.settle()
                self.attempts.remove(attempt)
        now = time.monotonic()
        if now - self._renewed > _RENEW_S:
            self.roster.register(self.name, self.config.queue, lease_s=LEASE_S)
            self._renewed = now
        if self._mailbox.orders() or now - self._checked > _TURN_S:
            self._checked = now
            self._check()
        self._take()

    def _put_right(self) -> None:
        """Register, and put back what the server says this worker runs and it does not.

        A server that died may have made a change and kept its reply to itself.
        """
        spare = [attempt.begun.claim for attempt in self.attempts]
        for job_id in self.roster.bury(self.name, self.config.queue, spare=spare):
            log.warning("%s: queued again, %s had lost it", job_id, self.name)
        self.roster.register(self.name, self.config.queue, lease_s=LEASE_S)

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
            self._put_right()
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
            rundir = RunDir.open(self.home.runs, job.id)
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

    def _request(self, job: Job, begun: Begun, rundir: RunDir) -> dict[str, Any]:
        """What a horse is told to do. Raises WarmdError."""
        model = rundir.read_spec().get("model")
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
            "model": _files_of(model) if model is not None else None,
        }

    # --- with the horses --------------------------------------------------------------------

    def _listen(self) -> None:
        """Wait until somebody has something to say, but not for long."""
        is_stuck = any(self._waits_for_horse(attempt) for attempt in self.attempts)
        is_urgent = any(attempt.settle is not None for attempt in self.attempts)
        timeout_s = 0.0 if is_urgent and self._away_until is None else _TURN_S
        horses = {horse.channel.fileno(): horse for horse in self.stable.horses}
        doors = [*horses, *self._mailbox.sockets()]
        readable, _, _ = select.select(doors, [], [], _HURRY_S if is_stuck else timeout_s)
        for door in readable:
            if door in horses:
                self._hear(horses[door])

    def _hear(self, horse: Horse) -> None:
        for message in horse.receive():
            # The zygote names no job: its one reply is to the request that asked for this horse.
            job_id = message.get("job") or next(iter(horse.attempts), None)
            attempt = horse.attempts.get(job_id) if job_id is not None else None
            if attempt is None:
                continue
            attempt.hear(message)
            if attempt.settle is not None:
                del horse.attempts[attempt.job.id]
                if not horse.is_resident:
                    horse.leave()
        if horse.channel.closed_by_peer:
            for attempt in horse.attempts.values():
                if horse.has_lived or attempt.job.id == horse.asked_for:
                    attempt.conclude_death(had_company=len(horse.attempts) > 1)
                else:
                    attempt.dismount()
            horse.attempts.clear()

    def _attend(self) -> None:
        """What is due by the clock, and horses for the jobs that have none."""
        for attempt in self.attempts:
            if self.draining:
                attempt.stop("drain")
            attempt.watch_time()
            if self._waits_for_horse(attempt):
                alone = attempt.is_suspect
                attempt.horse = self.stable.mount(attempt, alone=alone)
        self.stable.sweep()

    def _waits_for_horse(self, attempt: Attempt) -> bool:
        """Whether it is to have a horse now; suspects have one after the other."""
        if attempt.horse is not None or attempt.settle is not None:
            return False
        if not attempt.is_suspect:
            return True
        suspects = [other for other in self.attempts if other.is_suspect and other.settle is None]
        return not any(other.horse is not None for other in suspects) and suspects[0] is attempt


def _files_of(model: dict[str, Any]) -> dict[str, Any]:
    """A model, its folder and what its files are now: a resident horse has it only if all agree."""
    folder = fetch.local_folder(ModelConfig(**model))
    return {"config": model, "folder": str(folder), "files": fingerprint(folder)}


def main() -> None:
    """Run as `python -m warmd.daemon.worker HOME PARENT`, with its settings on stdin as JSON."""
    end_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    request = orjson.loads(sys.stdin.buffer.read())
    config = WorkerConfig(**request["config"])
    Worker(Home(Path(sys.argv[1])), request["url"], config, request["name"]).work()


if __name__ == "__main__":
    main()
