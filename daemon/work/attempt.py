"""One execution of a job in its worker's hands: orders to the horse, word from it, and the end.

Whatever ends it becomes a change in Redis, `settle`, which the worker makes as soon as the server
takes it: a server that is away comes back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...configs.queues import TRAIN
from ...jobs.user_code import tracebacks
from ..queue.jobs import Begun, Job, JobStore, Orders
from ..queue.stream import Outbox, Publisher
from ..runs.checkpoints import Checkpoints
from ..runs.events import EventLog, read
from ..runs.rundir import RunDir
from .horse_pool import Horse
from .watchdog import Watchdog

log = logging.getLogger(__name__)

_MOST_KILLS = 3
_TIMEOUT_GRACE_S = 30.0  # between a time limit's request to stop and the kill
_KILL_GRACE_S = 1.0  # for a job to leave a horse that it shares
_NOTE_PATIENCE_S = 1.0  # for the horse to be done with an event of its own


class Attempt:
    """A job that this worker has begun and not yet settled."""

    def __init__(
        self,
        store: JobStore,
        job: Job,
        begun: Begun,
        rundir: RunDir | None,
        request: dict[str, Any],
        outbox: Outbox,
    ) -> None:
        """`rundir`: None for a job that has none, of which nothing is then written or read.

        `outbox`: where events go that are to be copied to the stream.
        """
        self.job = job
        self.begun = begun
        self.request = request  # to the horse
        self.horse: Horse | None = None
        self.settle: Callable[[], object] | None = None  # what is left to tell Redis, at its end
        self.asked: set[str] = set()  # what the horse was told, in its words
        self.is_suspect = begun.suspect
        self._store = store
        self._rundir = rundir
        self._publisher = Publisher(outbox, job.id, rundir.events) if rundir is not None else None
        self._watchdog = Watchdog(rundir.log) if rundir is not None else None
        self._stall = ""  # what the job fails of, when a stall ends it
        self._step: int | None = None  # of its latest step event
        self._limit_s = job.timeout if job.timeout and job.timeout > 0 else None
        self._checkpoint = self._newest_checkpoint()
        self._has_stepped = False  # further than any execution before: no other steps are told
        self._is_held = False
        self._is_lost = False  # Redis no longer knows this execution: somebody else has the job
        self._began = time.monotonic()
        self._paused_at: float | None = None
        self._paused_s = 0.0
        self._deadline: float | None = None

    @property
    def is_fetching(self) -> bool:
        """Whether its model is still to come from a hub; there is no horse before that."""
        model = self.request.get("model")
        return self.settle is None and model is not None and model["folder"] is None

    # --- towards the horse ------------------------------------------------------------------

    def heed(self, orders: Orders) -> None:
        """Pass on what is asked of the job now."""
        if self.settle is not None:
            return
        if not orders.is_held:
            self._is_lost = True
            self.stop("kill")
        elif orders.stop is not None:
            self.stop(orders.stop)
        elif orders.pause == "release" or (orders.pause == "hold" and self.is_fetching):
            self.stop("pause")
        elif (orders.pause == "hold") != self._is_held and self.horse is not None:
            self._is_held = not self._is_held
            self._tell({"pause": self._is_held})

    def give_back(self) -> None:
        """End it, as others may soon have the job: its horse at once, then its claim."""
        if self.settle is not None:
            return
        if self.horse is None:
            self._settle(self._store.requeue)
        else:
            self.asked.add("give back")
            self.horse.kill()

    def dismount(self) -> None:
        """The horse never came: another is to be told all that this one was."""
        self.horse = None
        self.asked.clear()
        self._is_held = False
        self._deadline = None

    def stop(self, how: str) -> None:
        """Ask it, once, to save and stop; or to "kill" it.

        `how`: "drain", "cancel", "pause", "timeout", "stall" or "kill".

        A horse that runs this job alone is killed without being asked.
        """
        if self.settle is not None or how in self.asked:
            return
        self.asked.add(how)
        if self.horse is None:
            self._conclude_unbegun(how)
            return
        if how == "kill" and not self.horse.is_resident:
            self.horse.kill(self.job.id)
            return
        if how in ("kill", "timeout"):
            grace_s = _KILL_GRACE_S if how == "kill" else _TIMEOUT_GRACE_S
            self._deadline = time.monotonic() + grace_s
        self._tell({"stop": how})

    def watch_time(self) -> None:
        """Stop it at its time limit, pauses not counted; kill the horse of one that does not."""
        now = time.monotonic()
        paused_s = self._paused_s + (now - self._paused_at if self._paused_at is not None else 0.0)
        if self._limit_s is not None and now - self._began - paused_s > self._limit_s:
            self.stop("timeout")
        if self._deadline is not None and now > self._deadline and self.horse is not None:
            self.horse.kill(self.job.id)

    def watch_progress(self) -> None:
        """Say that it has stalled, and where; end it then, if that was asked for."""
        pid = self.horse.pid if self.horse is not None else None
        if self._watchdog is None or pid is None or self.settle is not None:
            return
        stall = self._watchdog.look(pid)
        if stall is None:
            return
        self._note("stall", step=self._step, **stall)
        if self._watchdog.ends_job:
            self._stall = (
                f"stalled: a {stall['activity']} took more than {stall['seconds']:.4g} s, "
                f"ten times the median"
            )
            self.stop("stall")
            # As long again as it has taken, for a step that does end.
            self._deadline = time.monotonic() + max(_TIMEOUT_GRACE_S, stall["seconds"])

    def _tell(self, order: dict[str, Any]) -> None:
        if self.horse is not None:
            self.horse.send({"job": self.job.id, **order})

    def catch_up(self) -> None:
        """Copy to the stream what it missed while the server was away."""
        if self._publisher is not None:
            self._publisher.catch_up()

    # --- from the horse ---------------------------------------------------------------------

    def hear(self, message: dict[str, Any]) -> None:
        """Take in what the horse, or the zygote in its place, says of the job."""
        if "activity" in message and self._watchdog is not None:
            self._watchdog.hear(message["activity"])
        elif "event" in message:
            event = message["event"]
            if self._publisher is not None:
                self._publisher.publish(event)
            match event["type"]:
                case "step":
                    self._has_stepped = True
                    self._step = event["step"]
                case "paused":
                    self._paused_at = time.monotonic()
                case "unpaused" if self._paused_at is not None:
                    self._paused_s += time.monotonic() - self._paused_at
                    self._paused_at = None
        elif "outcome" in message:
            self._conclude(message)
        elif "error" in message:  # the model could not be fetched, or not be loaded
            self.fail(message["error"])
        elif "folder" in message:
            self.request["model"]["folder"] = message["folder"]
        elif "bytes" in message:
            self._note("fetching", model=self.request["model"]["config"]["path"], **message)

    def fail(self, error: str) -> None:
        """It could not even be begun."""
        self._conclude(
            {
                "outcome": "failed",
                "error": tracebacks.cut(error, tracebacks.MOST_TRACE),
                "untold": True,
            }
        )

    def recall(self, result: dict[str, Any]) -> None:
        """An execution before this one wrote its result, and was killed before its worker knew."""
        if not self._is_told():
            self._note("finished", result=result)
        self._conclude({"outcome": "finished", "result": result})

    def _is_told(self) -> bool:
        """Whether the last execution that was begun told of its end before it was killed."""
        assert self._rundir is not None  # it has the result
        is_told = False
        try:
            for event in read(self._rundir.events):
                if event["type"] in ("started", "finished"):
                    is_told = event["type"] == "finished"
        except OSError as error:  # then it cannot be told, either
            log.warning("%s: %s", self.job.id, error)
        return is_told

    # --- the end ----------------------------------------------------------------------------

    def _conclude_unbegun(self, how: str) -> None:
        if how in ("drain", "pause"):
            if how == "pause" and self.is_fetching:
                self._note("paused", released=True)
            self._settle(self._store.requeue)
        elif how == "timeout":
            self._conclude_late()
        else:
            self._settle(self._store.stop, "stopped on request")

    def _conclude(self, said: dict[str, Any]) -> None:
        """Bring Redis to what the horse said."""
        store, retries_left = self._store, self.job.retries_left or 0
        match said["outcome"]:
            case _ if self._is_lost:
                self._settle(None)
            case "finished":
                self._settle(store.finish, said["result"])
            case "stopped" if said["reason"] in ("drain", "pause"):
                self._settle(store.requeue)
            case "stopped" if said["reason"] == "timeout":
                self._conclude_late()
            case "stopped" if said["reason"] == "stall":
                self._conclude_stalled()
            case "stopped" if said["reason"] == "kill":
                self._settle(store.stop, "killed on request")
            case "stopped":
                self._settle(store.stop, "stopped on request")
            case _ if retries_left > 0:
                self._note(
                    "requeued", reason="failed, will be tried again", retries_left=retries_left
                )
                self._settle(store.requeue, use_retry=True)
            case _:
                if "untold" in said:
                    self._note("failed", error=said["error"], traceback=None)
                self._settle(store.fail, said["error"])

    def conclude_death(self, *, had_company: bool) -> None:
        """The horse died without a last word on this job; `had_company`: it ran others, too."""
        assert self.horse is not None
        if self.settle is not None:
            return
        reason = self.horse.cause_of_death()
        if self._is_lost:
            self._settle(None)
        elif "kill" in self.asked:
            self._note("stopped", reason="killed on request")
            self._settle(self._store.stop, "killed on request")
        elif "timeout" in self.asked:
            self._conclude_late()
        elif "stall" in self.asked:
            self._conclude_stalled()
        elif "give back" in self.asked:
            self._note("requeued", reason="the worker lost touch with Redis")
            self._settle(self._store.requeue)
        elif self.horse.ended_for is not None:
            self._note("requeued", reason=f"its process was ended for {self.horse.ended_for}")
            self._settle(self._store.requeue)
        elif had_company:
            # Perhaps by another's fault: three of these must not end a job that did no harm.
            self._note("requeued", reason=f"{reason}; goes on in a process of its own")
            self._settle(self._store.requeue, suspect=True)
        else:
            self._conclude_killed(reason)

    def _conclude_killed(self, reason: str) -> None:
        """Try again, but not for ever."""
        has_progressed = self._has_stepped or self._newest_checkpoint() != self._checkpoint
        kills = 1 if has_progressed else 1 + self.begun.kills
        log.warning("%s: horse %s (%d in a row)", self.job.id, reason, kills)
        if kills < _MOST_KILLS:
            self._note("requeued", reason=reason)
            self._settle(self._store.requeue, kills=kills, suspect=True)
            return
        reason = f"{reason}; {kills} times in a row without a step more"
        self._note("failed", error=reason, traceback=None)
        self._settle(self._store.fail, reason)

    def _newest_checkpoint(self) -> Path | None:
        # From the disk: the event of a save that has just ended may die with the horse.
        found = Checkpoints(self._rundir.checkpoints).list() if self._rundir is not None else ()
        return found[-1] if found else None

    def _conclude_late(self) -> None:
        reason = f"took longer than its time limit of {self._limit_s:g} s"
        self._note("failed", error=reason, traceback=None)
        self._settle(self._store.fail, reason)

    def _conclude_stalled(self) -> None:
        self._note("failed", step=self._step, error=self._stall, traceback=None)
        self._settle(self._store.fail, self._stall)

    def _settle(self, change: Callable[..., object] | None, *args: Any, **kwargs: Any) -> None:
        def settle() -> None:
            if change is not None:
                change(self.job, self.begun.claim, *args, **kwargs)
            self.catch_up()
            has_ended = change not in (None, self._store.requeue)
            if has_ended and self.job.origin == TRAIN and self._publisher is not None:
                self._publisher.trim()  # answers are removed as a whole, see retention

        self.settle = settle

    def _note(self, type: str, **fields: Any) -> None:
        if self._rundir is None or self._publisher is None:
            return
        try:
            with EventLog(
                self._rundir.events,
                execution=self.begun.number,
                publish=self._publisher.publish,
                patience_s=_NOTE_PATIENCE_S,
            ) as events:
                events.emit(type, **fields)
        except OSError as error:  # a full disk: Redis has the reason all the same
            log.warning("%s: event %s not written: %s", self.job.id, type, error)
