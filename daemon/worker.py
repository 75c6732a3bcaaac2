"""A worker: takes jobs from one queue and watches over the horse that runs each.

It holds no model and imports no torch: the zygote forks the horse, the worker has a line to it.
RQ's own worker class is not used: its hand-off list is shared, its stop comes over a thread that
loses messages, and it fails what was quiet for seven minutes, such as a laptop that slept.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson
import redis
from rq.executions import Execution
from rq.job import Job

from ..configs.config import ModelConfig, WorkerConfig
from ..configs.values import memory_bytes
from ..jobs.errors import NotFound, WarmdError
from . import fetch, keys, memory
from .channel import Channel
from .events import EventLog
from .home import Home
from .jobstore import JobStore
from .leash import end_with_parent
from .rundir import RunDir
from .stream import Publisher

log = logging.getLogger(__name__)

LEASE_S = 10  # a worker that was silent this long is dead for the other machines
_TURN_S = 0.25  # how soon a request to stop is seen
_RENEW_S = 2.0
_POP_S = 0.5  # how long one wait for a job lasts
_MOST_KILLS = 3
_STOP_GRACE_S = 30.0  # between a time limit's request to stop and the kill

T = TypeVar("T")


@dataclass
class Outcome:
    """How an execution ended: what the horse said, and how the zygote saw it die."""

    said: dict[str, Any] | None = None
    exit_code: int | None = None
    peak_bytes: int | None = None
    progressed: bool = False  # a new checkpoint was committed
    lost: bool = False  # Redis no longer knows this execution: somebody else has the job
    limit_s: float | None = None  # the time limit that it broke
    horse: _Horse | None = None  # one that still has to be waited for


class Worker:
    """One worker process."""

    def __init__(self, home: Home, url: str, config: WorkerConfig, name: str) -> None:
        self.home = home
        self.config = config
        self.name = name
        self.connection = keys.connect(url, timeout_s=30.0)
        self.store = JobStore(self.connection)
        self.draining = False
        self._horse: Channel | None = None  # a resident one, between jobs
        self._renewed = 0.0

    def work(self) -> None:
        """Take and run jobs until SIGTERM; then give the running one back and return."""
        signal.signal(signal.SIGTERM, self._drain)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._insist(lambda: self.store.register(self.name, self.config.queue))
        log.info("%s: listening on %s", self.name, self.config.queue)
        os.write(1, b'{"stage": "ready"}\n')  # to the supervisor
        parent = os.getppid()
        while not self.draining and os.getppid() == parent:
            try:
                self._renew_lease()
                job = self.store.take(self.config.queue, self.name, timeout_s=_POP_S)
                if job is not None:
                    self._execute(job)
            except redis.RedisError as error:
                log.warning("%s: no server: %s", self.name, error)
                time.sleep(0.5)
                self._insist(self._let_go)
        self._insist(lambda: self.store.bury(self.name, self.config.queue))

    def _drain(self, *_: Any) -> None:
        self.draining = True

    def _let_go(self) -> None:
        """Put back what the server says this worker runs: it runs nothing now.

        A server that dies may have made a change and kept its reply to itself.
        """
        for job_id in self.store.bury(self.name, self.config.queue):
            log.warning("%s: queued again, %s had lost it", job_id, self.name)
        self.store.register(self.name, self.config.queue)

    # --- one job ----------------------------------------------------------------------------

    def _execute(self, job: Job) -> None:
        execution = self.store.begin(job, self.name)
        if execution is None:
            # Canceled meanwhile; or begun, and the server died with its reply unsent.
            self._insist(self._let_go)
            return
        try:
            self._carry_out(job, execution)
        except redis.RedisError:
            raise
        except Exception as error:  # one spoilt job must not end the worker, and then the daemon
            log.exception("%s: %s", job.id, self.name)
            reason = f"{type(error).__name__}: {error}"
            self._insist(lambda: self.store.fail(job, execution, reason))

    def _carry_out(self, job: Job, execution: Execution) -> None:
        number = self._insist(lambda: self.store.execution_number(job))
        log.info("%s: %s: execution %d", job.id, self.name, number)
        try:
            if not self.store.is_ours(job):
                raise NotFound(f"job: {job.id} is not one of warmd's")
            rundir = RunDir.open(self.home.runs, job.id)
            result = rundir.read_result()
            document = rundir.read_spec()
        except WarmdError as error:
            reason = str(error)
            self._insist(lambda: self.store.fail(job, execution, reason))
            return
        publisher = Publisher(self.connection, job.id, rundir.events)
        if result is not None:
            # The last execution ended after writing its result and before saying so.
            publisher.catch_up()
            self._insist(lambda: self.store.finish(job, execution, result))
            return
        if self._insist(lambda: self.store.stop_requested(job)) is not None:
            self._insist(lambda: self.store.stop(job, execution, "stopped on request"))
            return
        outcome = self._watch(job, execution, number, rundir, document, publisher)
        if not outcome.lost:
            self._conclude(job, execution, number, rundir, publisher, outcome)
        if outcome.horse is not None:
            self._await_end(outcome.horse, outcome, publisher)

    def _watch(
        self,
        job: Job,
        execution: Execution,
        number: int,
        rundir: RunDir,
        document: dict[str, Any],
        publisher: Publisher,
    ) -> Outcome:
        """Have the job run and stay with it to its end."""
        outcome = Outcome()
        begun = time.monotonic()
        try:
            request = self._request(job, number, rundir, document)
            channel = self._send_to_horse(request)
        except WarmdError as error:
            outcome.said = {"outcome": "failed", "error": str(error), "untold": True}
            return outcome
        if channel is None:
            outcome.said = {"outcome": "stopped", "reason": "drain"}
            return outcome
        horse = outcome.horse = _Horse(channel)
        limit = job.timeout if job.timeout and job.timeout > 0 else None
        checked = 0.0
        while True:
            readable, _, _ = select.select([channel], [], [], _TURN_S)
            if readable:
                for message in channel.receive():
                    self._heed(message, horse, outcome, publisher)
                if channel.closed_by_peer:
                    break
                if outcome.said is not None:
                    if self.config.isolation == "resident" and "untold" not in outcome.said:
                        self._horse, outcome.horse = channel, None
                    return outcome
            now = time.monotonic()
            if self.draining:
                horse.stop("drain")
            if limit is not None and now - begun > limit:
                outcome.limit_s = limit
                horse.stop("timeout", patience_s=_STOP_GRACE_S)
            if now - checked > _TURN_S:
                checked = now
                try:
                    self._renew_lease()
                    asked = self.store.stop_requested(job)
                    if not self.store.holds(job, execution):
                        outcome.lost = True
                        asked = "kill"
                    publisher.catch_up()
                except redis.RedisError as error:
                    log.debug("%s: %s", job.id, error)
                    asked = None
                if asked is not None:
                    horse.stop(asked)
            horse.kill_if_overdue()
        return outcome

    def _heed(
        self, message: dict[str, Any], horse: _Horse, outcome: Outcome, publisher: Publisher
    ) -> None:
        if "event" in message:
            publisher.publish(message["event"])
            if message["event"]["type"] == "checkpoint":
                outcome.progressed = True
        elif "pid" in message:
            horse.pid = message["pid"]
        elif "outcome" in message:
            outcome.said = message
        elif "exit" in message:
            outcome.exit_code = message["exit"]
            outcome.peak_bytes = message["peak_bytes"]
        elif "error" in message:  # the zygote's: the model could not be loaded
            outcome.said = {"outcome": "failed", "error": message["error"], "untold": True}

    def _request(
        self, job: Job, number: int, rundir: RunDir, document: dict[str, Any]
    ) -> dict[str, Any]:
        model = document.get("model")
        folder = None
        if model is not None:
            folder = str(fetch.local_folder(ModelConfig(**model)))
        return {
            "op": "run",
            "job_id": job.id,
            "run_dir": str(rundir.path),
            "execution": number,
            "isolation": self.config.isolation,
            "threads": self.config.threads,
            "enqueued_at": job.enqueued_at.timestamp() if job.enqueued_at else None,
            "model": {"config": model, "folder": folder} if model is not None else None,
        }

    def _send_to_horse(self, request: dict[str, Any]) -> Channel | None:
        """Hand the request to a horse and return the line to it; None when draining meanwhile.

        A zygote that died is back in seconds; the job waits for it here, started but not lost.
        """
        if self._horse is not None:
            channel, self._horse = self._horse, None
            try:
                channel.send(request)
            except OSError:
                channel.close()
            else:
                return channel
        while not self.draining:
            try:
                channel = Channel.connect(self.home.zygote_socket, timeout_s=30.0)
                channel.send(request)
            except OSError as error:
                log.debug("zygote: %s", error)
                self._renew_lease()
                time.sleep(0.05)
            else:
                return channel
        return None

    def _await_end(self, horse: _Horse, outcome: Outcome, publisher: Publisher) -> None:
        """After the last word (or without one), wait for the horse's end and its report."""
        channel = horse.channel
        deadline = time.monotonic() + _STOP_GRACE_S
        while not channel.closed_by_peer:
            readable, _, _ = select.select([channel], [], [], _TURN_S)
            if readable:
                for message in channel.receive():
                    self._heed(message, horse, outcome, publisher)
            if time.monotonic() > deadline:
                horse.kill()
        channel.close()

    def _conclude(
        self,
        job: Job,
        execution: Execution,
        number: int,
        rundir: RunDir,
        publisher: Publisher,
        outcome: Outcome,
    ) -> None:
        """Bring Redis to what the horse said; decide for one that died."""

        def note(type: str, **fields: Any) -> None:
            try:
                with EventLog(rundir.events, execution=number, publish=publisher.publish) as events:
                    events.emit(type, **fields)
            except OSError as error:  # a full disk: Redis has the reason all the same
                log.warning("%s: event %s not written: %s", job.id, type, error)

        said = outcome.said or {}
        asked = self._insist(lambda: self.store.stop_requested(job))
        match said.get("outcome"):
            case "finished":
                self._insist(lambda: self.store.finish(job, execution, said["result"]))
            case "stopped" if said["reason"] == "drain":
                self._insist(lambda: self.store.requeue(job, execution))
            case "stopped" if said["reason"] == "timeout":
                reason = f"took longer than its time limit of {outcome.limit_s:g} s"
                note("failed", error=reason, traceback=None)
                self._insist(lambda: self.store.fail(job, execution, reason))
            case "stopped":
                self._insist(lambda: self.store.stop(job, execution, "stopped on request"))
            case "failed" if (job.retries_left or 0) > 0:
                note(
                    "requeued", reason="failed, will be tried again", retries_left=job.retries_left
                )
                self._insist(lambda: self.store.requeue(job, execution, use_retry=True))
            case "failed":
                if "untold" in said:
                    note("failed", error=said["error"], traceback=None)
                self._insist(lambda: self.store.fail(job, execution, said["error"]))
            case _ if asked == "kill":
                note("stopped", reason="killed on request")
                self._insist(lambda: self.store.stop(job, execution, "killed on request"))
            case _ if outcome.limit_s is not None:
                reason = f"took longer than its time limit of {outcome.limit_s:g} s"
                note("failed", error=reason, traceback=None)
                self._insist(lambda: self.store.fail(job, execution, reason))
            case _:
                self._requeue_killed(job, execution, outcome, note)
        publisher.catch_up()

    def _requeue_killed(
        self, job: Job, execution: Execution, outcome: Outcome, note: Callable[..., None]
    ) -> None:
        """The horse died without a word: try again, but not for ever."""
        reason = _cause_of_death(outcome)
        kills = 1 if outcome.progressed else 1 + self._insist(lambda: self.store.kills(job))
        self._insist(lambda: self.store.note_kills(job, kills))
        log.warning("%s: horse %s (%d in a row)", job.id, reason, kills)
        if kills < _MOST_KILLS:
            note("requeued", reason=reason)
            self._insist(lambda: self.store.requeue(job, execution))
            return
        reason = f"{reason}; {kills} times in a row without a new checkpoint"
        note("failed", error=reason, traceback=None)
        self._insist(lambda: self.store.fail(job, execution, reason))

    # --- Redis ------------------------------------------------------------------------------

    def _renew_lease(self) -> None:
        if time.monotonic() - self._renewed > _RENEW_S:
            self.store.renew_lease(self.name, seconds=LEASE_S)
            self._renewed = time.monotonic()

    def _insist(self, change: Callable[[], T]) -> T:
        """Repeat a change until the server has taken it: a server that is away comes back.

        A change whose reply got lost is not made twice: it holds only for a live execution.
        """
        while True:
            try:
                return change()
            except redis.RedisError as error:
                log.warning("%s: waiting for the server: %s", self.name, error)
                time.sleep(0.2)


class _Horse:
    """The worker's view of a running horse."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.pid: int | None = None
        self._asked: set[str] = set()
        self._deadline: float | None = None

    def stop(self, how: str, *, patience_s: float | None = None) -> None:
        """Ask it to save and stop, once; `how` "kill" does not ask."""
        if how == "kill":
            self.kill()
            return
        if how in self._asked:
            return
        self._asked.add(how)
        if patience_s is not None:
            self._deadline = time.monotonic() + patience_s
        self.channel.send_if_heard({"stop": how})

    def kill_if_overdue(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.kill()

    def kill(self) -> None:
        if self.pid is not None and not self.channel.closed_by_peer:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def _cause_of_death(outcome: Outcome) -> str:
    code = outcome.exit_code
    peak = ""
    if outcome.peak_bytes is not None:
        peak = f": peak {memory.shown(outcome.peak_bytes)} of {memory.shown(memory_bytes())}"
    if code is None:
        return "lost: its process disappeared"
    if code >= 0:
        return f"ended with exit code {code} without a result{peak}"
    name = signal.Signals(-code).name
    perhaps = ", perhaps out of memory" if -code == signal.SIGKILL else ""
    return f"killed by {name}{perhaps}{peak}"


def main() -> None:
    """Run as `python -m warmd.daemon.worker HOME PARENT`, with its settings on stdin as JSON."""
    end_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    request = orjson.loads(sys.stdin.buffer.read())
    config = WorkerConfig(**request["config"])
    Worker(Home(Path(sys.argv[1])), request["url"], config, request["name"]).work()


if __name__ == "__main__":
    main()
