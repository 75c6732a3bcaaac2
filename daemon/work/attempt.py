"""State machine of one execution of a job, from its start in Redis to its end.

State      Condition                                      Next state
PREPARING  the run directory or the model is not here     READY: `prepare`, `Downloaded`
READY      the request for a horse is complete            RUNNING: `give`
RUNNING    a horse has the request                        READY: `detach`, a shortage
ENDED      `settle` is the change in Redis that ends it   none

Each of the first three states changes to ENDED by an outcome or the death of the horse, a request
to stop, the end of ranks on other nodes, or a job that cannot be run. The attempt sends stop and
pause requests to the horse and handles its messages. The worker calls `settle` as soon as Redis is
reachable, and then drops the attempt.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any

from ...configs.queues import INFER, TRAIN
from ...jobs.files.shortage import Shortage, can_start_threads, no_process, shortage
from ...jobs.user_code import tracebacks
from ..host.backoff import backoff_s
from ..host.messages import (
    Downloaded,
    DownloadProgress,
    Failure,
    GangListening,
    GangMet,
    GangPlan,
    JobActivity,
    JobEvent,
    JobOutcome,
    JobWaits,
    Message,
    PauseJob,
    RunJob,
    StopJob,
)
from ..queue.jobs import ControlRequests, Job, JobStore, StartedExecution
from ..queue.stream import StreamWriter
from ..runs.checkpoints import Checkpoints
from ..runs.events import read
from ..runs.rundir import RunDir
from .attempt_log import AttemptLog
from .horse import Horse
from .run_fetches import RunFetch
from .timeout import Timeout
from .watchdog import Watchdog

log = logging.getLogger(__name__)

_MAX_KILLS = 3
_TIMEOUT_GRACE_S = 30.0  # between the stop request at a time limit and the kill
# Pauses before a job that has failed is tried again.
_FIRST_RETRY_S = 1.0
_LONGEST_RETRY_S = 60.0
_OTHER_THREADS = 6  # threads of a horse that do not compute
_KILL_GRACE_S = 1.0  # for a job to leave a horse that it shares
# For an answer to stop between two tokens. A longer computation hangs: nobody waits for it any
# more, but the jobs behind it do.
STUCK_S = 300.0
# Pauses before another horse is requested after a shortage.
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0


class State(Enum):
    """The state of an execution; the module's docstring describes each."""

    PREPARING = auto()
    READY = auto()
    RUNNING = auto()
    ENDED = auto()


_NEXT = {
    State.PREPARING: {State.READY, State.ENDED},
    State.READY: {State.RUNNING, State.ENDED},
    State.RUNNING: {State.READY, State.ENDED},
    State.ENDED: set(),
}


class Attempt:
    """An execution that this worker has started and not yet settled."""

    def __init__(
        self, store: JobStore, job: Job, started: StartedExecution, writer: StreamWriter
    ) -> None:
        """`writer`: copies events to the streams.

        Until `set_rundir` is called no events are written or read.
        """
        self.job = job
        self.started = started
        self.state = State.PREPARING
        self.request: RunJob | None = None  # what is sent to the horse
        self.fetch: RunFetch | None = None  # of its run directory from the run store
        self.is_stored = True  # nothing must be uploaded before its end is reported
        self.horse: Horse | None = None
        self.settle: Callable[[], object] | None = None  # the change in Redis that ends it
        self.ended: str | None = None  # finished or failed, once `settle` ends the job so
        self.requested: set[str] = set()  # reasons for which it was asked to stop
        self.gang_port: int | None = None  # where rank 0 listens, if it runs on several nodes
        self.has_gang_met = False  # whether all ranks are connected
        self._store = store
        self._writer = writer
        self.waits_for: str | None = None  # what the machine lacks; as of `check_shortage`
        self._reported_wait: str | None = None  # as of the latest report to Redis
        self._rundir: RunDir | None = None
        self._log: AttemptLog | None = None
        self._lacking: Shortage | None = None  # what the horse waits for, or the job before it
        self._not_before = 0.0  # when a horse is requested again
        self._lacked_at: int | None = None  # the job's step at the latest shortage
        self._is_rerun = False  # whether it has emitted no event since a shortage
        self._num_lacking = 0  # shortages in a row without a step in between
        self._watchdog: Watchdog | None = None
        self._checkpoint: Path | None = None  # the newest when it began
        self._store_problem: str | None = None
        self._stall_error = ""  # the job's error if a stall ends it
        self._step: int | None = None  # of its latest step event
        self._timeout = Timeout(job.timeout if job.timeout and job.timeout > 0 else None)
        self._has_stepped = False  # beyond all earlier executions: only such steps are reported
        self._is_paused = False
        self._conclude_ranks: Callable[[], None] | None = None  # if ranks elsewhere end it
        self._has_lost_claim = False  # Redis no longer knows this execution
        self._is_record_gone = False  # whether Redis no longer has the job either

    def _become(self, state: State) -> None:
        assert state in _NEXT[self.state], f"{self.job.id}: {self.state} to {state}"
        self.state = state

    def set_rundir(self, rundir: RunDir) -> None:
        """Use a run directory, from now on."""
        self._rundir = rundir
        clock = self._store.shared_clock
        self._log = AttemptLog(
            self._writer, rundir, self.started.number, lambda: clock.latest_offset_s
        )
        self._watchdog = Watchdog(rundir.log)
        self._checkpoint = self._newest_checkpoint()

    def prepare(self, request: RunJob | None) -> None:
        """Set the request for a horse; the job gets one once the request's model is here.

        None: the job cannot be run.
        """
        self.request = request
        is_whole = request is not None and not self.is_downloading
        if is_whole and self.state is State.PREPARING:
            self._become(State.READY)

    def join(self, plan: GangPlan) -> None:
        """Run together with ranks on other nodes."""
        assert self.request is not None
        self.request = replace(self.request, gang=plan)

    def give(self, horse: Horse) -> None:
        """Let a horse run the job. It replaces a horse that the zygote did not fork."""
        if self.state is not State.RUNNING:
            self._become(State.RUNNING)
        self.horse = horse

    @property
    def has_ended(self) -> bool:
        """Whether the execution has ended; its end may still have to be written to Redis."""
        return self.state is State.ENDED

    @property
    def is_suspect(self) -> bool:
        """Whether the job may have killed a horse that it shared; it gets one of its own."""
        return self.started.suspect

    @property
    def has_rundir(self) -> bool:
        """Whether its run directory is known and can be written."""
        return self._rundir is not None

    @property
    def is_downloading(self) -> bool:
        """Whether its model or run directory is still being downloaded; it gets no horse before."""
        model = self.request.model if self.request is not None else None
        is_model_away = model is not None and model.folder is None
        return self.state is State.PREPARING and (self.fetch is not None or is_model_away)

    # --- requests to the horse --------------------------------------------------------------

    def apply(self, control: ControlRequests) -> None:
        """Apply the stop and pause requests that Redis currently has for the job."""
        if self.has_ended:
            if control.stop == "kill" or not control.has_claim:
                self.is_stored = True  # its end no longer waits for the run store
            return
        if not control.has_claim:
            self._has_lost_claim = True
            self._is_record_gone = self._store.fetch(self.job.id) is None
            self.stop("kill")
        elif control.stop is not None:
            self.stop(control.stop)
        elif control.pause == "release" or (control.pause == "hold" and self.is_downloading):
            self.stop("pause")
        elif (control.pause == "hold") != self._is_paused and self.horse is not None:
            self._is_paused = not self._is_paused
            self.horse.send(PauseJob(self.job.id, self._is_paused))

    def release(self) -> None:
        """Kill the horse and requeue the job, because other workers may soon take it."""
        if self.has_ended:
            return
        if self.horse is None:
            self._settle(self._store.requeue, reason="worker_died")
        else:
            self.requested.add("release")
            self.horse.kill()

    def end_ranks(self, cause: str, *, have_died: bool = False, have_failed: bool = False) -> None:
        """End the execution because of its ranks on another node; the job is queued again.

        `have_died`: as a death of the horse here would, this counts towards `_MAX_KILLS`.
        `have_failed`: the job fails, and `cause` is the reason.
        """
        if self.has_ended:
            return
        if self._conclude_ranks is None:
            if have_failed:
                self._conclude_ranks = partial(self.fail, cause)
            elif have_died:
                self._conclude_ranks = partial(self._conclude_killed, cause)
            else:
                self._conclude_ranks = partial(self._conclude_lost, cause)
        if self.horse is None:
            self._conclude_ranks()
        else:
            self.horse.kill()  # repeated by the caller: it may have been forked just now

    def detach(self) -> None:
        """Drop a horse that never started, and end the execution if it was to stop.

        Otherwise the next horse gets all requests again.
        """
        requested, self.requested = self.requested, set()
        self.horse = None
        self._is_paused = False
        self._timeout.clear_deadline()
        if self.state is State.RUNNING:
            self._become(State.READY)
        if "release" in requested:
            self.release()
        for reason in requested - {"release"}:
            self.stop(reason)

    def stop(self, reason: str) -> None:
        """Request, once per reason, that the job saves and stops; "kill" ends it without saving.

        `reason`: "drain", "cancel", "pause", "timeout", "stall" or "kill". For "kill", a horse that
        runs only this job is killed at once.
        """
        if self.has_ended or reason in self.requested:
            return
        self.requested.add(reason)
        if self.horse is None:
            self._conclude_without_horse(reason)
            return
        if reason == "kill" and not self.horse.is_resident:
            self.horse.kill(self.job.id)
            self._timeout.set_deadline(0.0)  # once more, if it has not started yet
            return
        grace_s = {"kill": _KILL_GRACE_S, "timeout": _TIMEOUT_GRACE_S}.get(reason)
        if reason == "cancel" and self.job.origin == INFER:  # a training may save for long
            grace_s = STUCK_S
        if grace_s is not None:
            self._timeout.set_deadline(grace_s)
        self.horse.send(StopJob(self.job.id, reason))

    def check_time_limit(self) -> None:
        """Stop the job at its time limit; kill its horse after the grace.

        Pauses do not count, nor does waiting for what the machine lacks.
        """
        if self._timeout.is_over:
            self.stop("timeout")
        if self._timeout.is_past_deadline and self.horse is not None:
            self.horse.kill(self.job.id)

    def check_progress(self) -> None:
        """Report a stall and where the job hangs; stop the job if its option says so."""
        pid = self.horse.pid if self.horse is not None else None
        if self._watchdog is None or pid is None or self.has_ended:
            return
        stall = self._watchdog.check(pid)
        if stall is None:
            return
        self._log_event("stall", step=self._step, **asdict(stall))
        if self._watchdog.ends_job:
            self._stall_error = (
                f"stalled: a {stall.activity} took more than {stall.seconds:.4g} s, "
                f"ten times the median"
            ) + (f": {stall.message}" if stall.message is not None else "")
            self.stop("stall")
            # The activity may still end: wait for the same time again.
            self._timeout.move_deadline(max(_TIMEOUT_GRACE_S, stall.seconds))

    def catch_up(self) -> None:
        """Copy the events that the stream missed while Redis was unreachable."""
        if self._log is not None:
            self._log.catch_up()

    def report_fetch(self) -> None:
        """Report the progress of its run directory, twice a second at most."""
        if self.fetch is not None and (progress := self.fetch.progress_if_due()) is not None:
            self._log_event("fetching", **progress)

    def warn(self, message: str) -> None:
        """Emit a warning about the job that needs attention."""
        self._log_event("warning", message=message)

    def note_store(self, problem: str | None) -> None:
        """Report once that uploads to the run store fail, and that they succeed again."""
        if problem is not None and self._store_problem is None:
            self._log_event(
                "warning",
                message=f"{problem}: the job continues, its checkpoints are on "
                f"{platform.node()} only until uploads succeed",
            )
        elif problem is None and self._store_problem is not None and not self.has_ended:
            self._log_event("warning", message="run store: can be written again")
        self._store_problem = problem

    def supersede(self) -> None:
        """End the execution: a later one has claimed the run directory."""
        self._conclude(JobOutcome(self.job.id, "stopped", reason="superseded"))

    # --- messages from the horse ------------------------------------------------------------

    def handle(self, message: Message) -> None:
        """Handle a message about the job from the horse, the zygote or a download."""
        if self.has_ended:  # the job was stopped during its download, which ends later
            return
        match message:
            case JobEvent():
                self._handle_event(message.event, is_written=message.is_written)
            case JobWaits():
                what, reason = message.what, message.reason
                self.set_lacking(None if what is None else Shortage(what, reason))
            case JobActivity() if self._watchdog is not None:
                self._watchdog.set_activity(message.activity)
            case JobOutcome():
                self._conclude(message)
            case GangListening():
                self.gang_port = message.port
            case GangMet():
                self.has_gang_met = True
            case Failure():  # the model could not be downloaded or loaded
                self.fail(message.error)
            case Downloaded() if self.request is not None and self.request.model is not None:
                model = replace(self.request.model, folder=message.folder)
                self.prepare(replace(self.request, model=model))
            case DownloadProgress() if self.request is not None and self.request.model is not None:
                self._log_event(
                    "fetching",
                    model=self.request.model.config.path,
                    bytes=message.bytes,
                    total_bytes=message.total_bytes,
                )

    def _handle_event(self, event: dict[str, Any], *, is_written: bool) -> None:
        if self._is_rerun:
            self._is_rerun = False
            self.set_lacking(None)
        if self._log is not None:
            self._log.received(event, is_written=is_written)
        match event["type"]:
            case "step":
                self._has_stepped = True
                self._step = event["step"]
            case "paused":
                self._timeout.set_idle("paused", True)
            case "unpaused":
                self._timeout.set_idle("paused", False)

    # --- what the machine lacks -------------------------------------------------------------

    def may_have_horse(self) -> bool:
        """Whether a horse may be requested: not while the machine is known to lack something."""
        is_behind = self._log is not None and self._log.is_behind
        return not is_behind and time.monotonic() >= self._not_before

    def may_settle(self) -> bool:
        """Whether all its events are written; somebody who stops it does not wait for that."""
        is_behind = self._log is not None and self._log.is_behind
        is_urgent = self._has_lost_claim or self.requested - {"timeout", "stall"}
        return not is_behind or bool(is_urgent)

    def check_shortage(self) -> None:
        """Write the events that wait for space, and update `waits_for`."""
        lacks = None
        if self._log is not None:
            if self.state is not State.RUNNING:
                self._log.write_if_due()
            lacks = self._log.lacks
        lacks = lacks or self._lacking
        waits_for = None if lacks is None else lacks.what
        if waits_for != self.waits_for:
            if waits_for is not None:
                log.warning("%s: waits for %s", self.job.id, waits_for)
            else:
                log.info("%s: no longer waits", self.job.id)
            self._timeout.set_idle("waiting", waits_for is not None)
            self.waits_for = waits_for

    def restore_events(self) -> None:
        """Write back what a power failure took from the file, if Redis has it. Raises RedisError.

        The job gets a horse once that is done.
        """
        if self._log is not None and self.started.number > 1:
            self._log.restore()
            self.check_shortage()

    def report_wait(self) -> None:
        """Note in Redis what the job waits for, if that has changed. Raises RedisError."""
        if self.waits_for != self._reported_wait and not self.has_ended:
            self._store.note_wait(self.job, self.waits_for)
            self._reported_wait = self.waits_for

    def set_lacking(self, lacking: Shortage | None) -> None:
        """Set what the machine lacks that the job needs now."""
        if lacking == self._lacking:
            return
        self._lacking = lacking
        if self._watchdog is not None:
            self._watchdog.set_waiting(lacking is not None)
        self.check_shortage()

    def run_again_after(self, error: BaseException) -> None:
        """Request a horse later, after an error that a shortage has caused."""
        lacking = shortage(error)
        assert lacking is not None
        self._run_again(lacking.what, lacking.reason)

    def _run_again(self, what: str, reason: str) -> None:
        """Request another horse later: the machine lacks something without which none can run.

        The job keeps its slot, and no retry is used.
        """
        if self.request is not None and self.request.gang is not None:  # other nodes run it, too
            self._log_event("requeued", reason=f"lacks {what}: {reason}")
            self._settle(self._store.requeue)
            return
        if self._step != self._lacked_at:
            self._num_lacking = 0
        pause_s = backoff_s(self._num_lacking, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        self._num_lacking += 1
        self._lacked_at = self._step
        self._not_before = time.monotonic() + pause_s
        log.warning("%s: %s: runs again in %g s", self.job.id, reason, pause_s)
        self.detach()
        if not self.has_ended:
            self._is_rerun = True
            self.set_lacking(Shortage(what, reason))

    def fail(self, error: str) -> None:
        """Fail a job that could not be started."""
        error = tracebacks.cut(error, tracebacks.MOST_TRACE)
        self._conclude(JobOutcome(self.job.id, "failed", error=error, is_logged=False))

    def set_aside(self, path: str, machine: str) -> None:
        """Leave the job to a machine that has the model folder at `path`; this one does not."""
        reason = f"{machine} has no model folder {path}: waits for a machine that has it"
        self._log_event("requeued", reason=reason)
        self._settle(self._store.set_aside_for_model, path)

    def finish_from_disk(self, result: dict[str, Any]) -> None:
        """Finish a job whose previous execution wrote its result to disk, but not to Redis."""
        if not self._has_logged_end():
            self._log_event("finished", result=result)
        self._conclude(JobOutcome(self.job.id, "finished"))

    def _has_logged_end(self) -> bool:
        """Whether the last execution that started has logged its `finished` event."""
        assert self._rundir is not None  # it has the result
        has_logged = False
        try:
            for event in read(self._rundir.events):
                if event["type"] in ("started", "finished"):
                    has_logged = event["type"] == "finished"
        except OSError as error:  # in this case it cannot be written either
            log.warning("%s: %s", self.job.id, error)
        return has_logged

    # --- the end ----------------------------------------------------------------------------

    def _conclude_without_horse(self, reason: str) -> None:
        if reason in ("drain", "pause"):
            if reason == "pause" and self.is_downloading:
                self._log_event("paused", released=True)
            self._settle(self._store.requeue)
        elif reason == "timeout":
            self._conclude_timeout()
        elif reason == "stall":  # requested when the horse had just reported a shortage
            self._conclude_stalled()
        else:
            self._settle(self._store.stop, "stopped on request")

    def _conclude(self, outcome: JobOutcome) -> None:
        """End the execution with the outcome that the horse reported."""
        store = self._store
        match outcome.outcome:
            case _ if self._has_lost_claim:
                self._conclude_without_claim()
            case "finished":
                self._settle(store.finish)
            case "stopped" if outcome.reason in ("drain", "pause", "superseded"):
                self._settle(store.requeue)
            case "stopped" if outcome.reason == "timeout":
                self._conclude_timeout()
            case "stopped" if outcome.reason == "stall":
                self._conclude_stalled()
            case "stopped" if outcome.reason == "kill":
                self._settle(store.stop, "killed on request")
            case "stopped":
                self._settle(store.stop, "stopped on request")
            case "lost":
                self._conclude_killed(outcome.error)
            case "lacking" if "kill" in self.requested:
                self._settle(store.stop, "killed on request")
            case "lacking":
                self._run_again(outcome.error, outcome.reason)
            case _:
                self._conclude_failed(outcome)

    def _conclude_without_claim(self) -> None:
        """End an execution that is no longer the current one in Redis."""
        log.warning(
            "%s: stopped: Redis no longer has execution %d", self.job.id, self.started.number
        )
        if self._is_record_gone:  # else another worker runs the job and logs its events
            self.warn(
                "stopped: the job's record in Redis has gone (deleted, flushed or evicted): "
                f"continue with `warmd resume {self.job.id}`"
            )
        self._settle(None)

    def _conclude_failed(self, outcome: JobOutcome) -> None:
        if self._retry("failed"):
            return
        if not outcome.is_logged:
            self._log_event("failed", error=outcome.error, traceback=None)
        self._settle(self._store.fail, outcome.error)

    def conclude_death(self, *, is_shared: bool) -> None:
        """End the execution because its horse died; `is_shared`: the horse ran other jobs too."""
        assert self.horse is not None
        if self.has_ended:
            return
        cause = self.horse.cause_of_death()
        if self._has_lost_claim:
            self._conclude_without_claim()
        elif "kill" in self.requested:
            self._log_event("stopped", reason="killed on request")
            self._settle(self._store.stop, "killed on request")
        elif "timeout" in self.requested:
            self._conclude_timeout()
        elif "stall" in self.requested:
            self._conclude_stalled()
        elif "cancel" in self.requested and self.horse.killed_for == self.job.id:
            reason = f"canceled, and killed because it did not stop within {STUCK_S:g} s"
            self._log_event("stopped", reason=reason)
            self._settle(self._store.stop, reason)
        elif "release" in self.requested:
            self._log_event("requeued", reason="the worker lost its connection to Redis")
            self._settle(self._store.requeue, reason="worker_died")
        elif self._conclude_ranks is not None:
            self._conclude_ranks()
        elif self.horse.killed_for is not None:
            self._log_event(
                "requeued", reason=f"its process was killed because of {self.horse.killed_for}"
            )
            self._settle(self._store.requeue, reason="horse_died")
        elif is_shared:
            # Another job may be the cause: such a death does not count towards _MAX_KILLS.
            self._log_event("requeued", reason=f"{cause}; resumes in a process of its own")
            self._settle(self._store.requeue, reason="horse_died", suspect=True)
        elif self.horse.has_failed() and not can_start_threads(self._num_threads()):
            lacking = no_process("Resource temporarily unavailable")
            self._run_again(lacking.what, f"{cause}; {lacking.reason}")
        else:
            self._conclude_killed(cause)

    def _num_threads(self) -> int:
        """Return about how many threads its horse needs."""
        threads = self.request.threads if self.request is not None else None
        return (threads or os.cpu_count() or 1) + _OTHER_THREADS

    def _conclude_lost(self, cause: str) -> None:
        self._log_event("requeued", reason=cause)
        self._settle(self._store.requeue, reason="worker_died")

    def _conclude_killed(self, cause: str) -> None:
        """Requeue the job; after `_MAX_KILLS` deaths in a row without progress it has failed."""
        has_progressed = self._has_stepped or self._newest_checkpoint() != self._checkpoint
        kills = 1 if has_progressed else 1 + self.started.kills
        log.warning("%s: horse %s (%d in a row)", self.job.id, cause, kills)
        if kills < _MAX_KILLS:
            self._log_event("requeued", reason=cause)
            self._settle(self._store.requeue, reason="horse_died", kills=kills, suspect=True)
            return
        error = f"{cause}; {kills} times in a row without completing a step"
        if not self._retry(error, kills=0, suspect=True):
            self._log_event("failed", error=error, traceback=None)
            self._settle(self._store.fail, error)

    def _retry(self, reason: str, **fields: Any) -> bool:
        """Requeue a job that has failed, if it may be retried; return whether it may."""
        retries_left = self.started.retries_left
        if retries_left > 0:
            pause_s = backoff_s(
                self.started.retried, first_s=_FIRST_RETRY_S, longest_s=_LONGEST_RETRY_S
            )
            self._log_event(
                "requeued",
                reason=f"{reason}, will be tried again in {pause_s:g} s",
                retries_left=retries_left,
            )
            self._settle(self._store.requeue, reason="failed", retry_in_s=pause_s, **fields)
        return retries_left > 0

    def _newest_checkpoint(self) -> Path | None:
        # From disk: the event of a save that has just ended may be lost with the horse.
        found = Checkpoints(self._rundir.checkpoints).list() if self._rundir is not None else ()
        return found[-1] if found else None

    def _conclude_timeout(self) -> None:
        error = f"took longer than its time limit of {self._timeout.seconds:g} s"
        if self._retry(error):
            return
        self._log_event("failed", error=error, traceback=None)
        self._settle(self._store.fail, error)

    def _conclude_stalled(self) -> None:
        if self._retry(self._stall_error):
            return
        self._log_event("failed", step=self._step, error=self._stall_error, traceback=None)
        self._settle(self._store.fail, self._stall_error)

    def _settle(self, change: Callable[..., object] | None, *args: Any, **kwargs: Any) -> None:
        """End the execution; the change in Redis follows."""
        self._become(State.ENDED)

        def settle() -> None:
            if change is not None:
                change(self.job, self.started.claim, *args, **kwargs)
            if self._log is not None:
                self._log.publish_own()
            self.catch_up()
            store = self._store
            has_ended = change not in (None, store.requeue, store.set_aside_for_model)
            if has_ended and self.job.origin == TRAIN and self._log is not None:
                self._log.trim()  # streams of answers are removed as a whole by retention

        self.settle = settle
        if change == self._store.finish:
            self.ended = "finished"
        elif change == self._store.fail:
            self.ended = "failed"

    def _log_event(self, type: str, **fields: Any) -> None:
        if self._log is not None:
            self._log.emit(type, **fields)
