"""One execution of a job in a horse, from top to bottom: lock, log, context, run, outcome.

The horse is the only writer of the run directory while it has its lock. Processes that the job's
own code starts end with the job (host/descendants.py).
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ...configs.queues import TRAIN
from ...jobs import spec_class
from ...jobs.context import Context
from ...jobs.errors import JobFailed, Stopped, WarmdError
from ...jobs.files.atomic import release
from ...jobs.files.shortage import Patience, Shortage, lacks_space, shortage
from ...jobs.spec import Spec
from ...jobs.user_code import limited_processes, tracebacks
from ...jobs.user_code.modules import own_modules
from ..host.channel import check_size
from ..host.descendants import end_descendants
from ..host.messages import (
    GangListening,
    GangMet,
    JobActivity,
    JobEvent,
    JobOutcome,
    JobWaits,
    Message,
    RunJob,
)
from ..runs import source
from ..runs.checkpoints import Checkpoints
from ..runs.events import EventLog, read
from ..runs.fence import Fence, Superseded
from ..runs.rundir import RunDir
from ..runs.running_time import running_s
from .activity import ActivityReporter
from .before_run import (
    check_device,
    check_processes,
    choose_threads,
    hold_files,
    models_for,
    run_of,
    software_of,
    warn_of_changed_weights,
)
from .following import follow
from .horse_models import HorseModels
from .job_output import redirect_output
from .models import WarmModels
from .placement import Placement
from .rank_processes import RanksLost, run_in_processes, run_on_nodes
from .rendezvous import Rendezvous
from .worker_connection import JobControl, WorkerConnection

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Execution:
    """A requested execution, in a run directory that this process alone writes."""

    request: RunJob
    control: JobControl
    warm: WarmModels
    placement: Placement
    is_resident: bool  # this process runs other jobs too
    fence: Fence
    events: EventLog
    activity: ActivityReporter
    send: Callable[[Message], None]  # to the worker
    patience: Patience  # repeats writes while the disk is full

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.fence.folder)


def execute(
    connection: WorkerConnection,
    request: RunJob,
    control: JobControl,
    warm: WarmModels,
    placement: Placement,
    *,
    is_resident: bool,
    own_output: bool = True,
) -> None:
    """Run a job and report how it ended.

    `is_resident`: this horse runs other jobs too. `own_output`: stdout and stderr of the process
    go to the job's log.
    """
    rundir = RunDir(Path(request.run_dir))
    job_id = request.job_id
    reporter = _WaitReporter(job_id, connection.send)
    patience = Patience(control.stop, on_change=reporter.report)
    try:
        if own_output:
            patience.write(lambda: redirect_output(rundir.log), rundir.path)
        lock = patience.write(rundir.lock, rundir.path) if request.is_first_node else None
        try:
            if lock is None:
                outcome = follow(request, warm, placement, connection.send)
            else:
                outcome = _run_in_log(
                    connection,
                    request,
                    control,
                    warm,
                    placement,
                    reporter=reporter,
                    patience=patience,
                    is_resident=is_resident,
                )
        finally:
            if lock is not None:
                release(lock)
            if own_output:  # the horse runs no other job
                _end_processes()
    except Superseded as error:
        log.warning("%s", error)
        outcome = JobOutcome(job_id, "stopped", reason="superseded")
    except OSError as error:  # its files cannot be written
        lacking = shortage(error, rundir.path)
        if lacks_space(error):  # the job was to stop before it began
            outcome = JobOutcome(job_id, "stopped", reason=control.reason)
        elif lacking is not None:
            outcome = lacking_outcome(job_id, lacking)
        else:
            error_text = f"run directory: {error}"
            outcome = JobOutcome(job_id, "failed", error=error_text, is_logged=False)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.drop_job(job_id)
    connection.send(outcome)


def _run_in_log(
    connection: WorkerConnection,
    request: RunJob,
    control: JobControl,
    warm: WarmModels,
    placement: Placement,
    *,
    reporter: _WaitReporter,
    patience: Patience,
    is_resident: bool,
) -> JobOutcome:
    """Run a job whose run directory is locked, as the only writer there. Raises Superseded."""
    rundir, job_id = RunDir(Path(request.run_dir)), request.job_id
    fence = Fence(rundir.path, request.execution)
    patience.write(fence.claim, rundir.path)
    open_log = partial(
        EventLog,
        rundir.events,
        execution=request.execution,
        clock_offset_s=request.clock_offset_s,
        publish=lambda event: connection.send(JobEvent(job_id, event)),
        announce=lambda event: connection.send(JobEvent(job_id, event, is_written=False)),
        patiently=patience.write,
    )
    events = reporter.events = patience.write(open_log, rundir.path)
    activity = ActivityReporter(lambda now: connection.send(JobActivity(job_id, now)))
    with events, activity:
        execution = _Execution(
            request=request,
            control=control,
            warm=warm,
            placement=placement,
            is_resident=is_resident,
            fence=fence,
            events=events,
            activity=activity,
            send=connection.send,
            patience=patience,
        )
        return _outcome_of(execution)


def _outcome_of(execution: _Execution) -> JobOutcome:
    """Run the job; report any kind of end as an event and an outcome. Raises Superseded."""
    request, control, events = execution.request, execution.control, execution.events
    job_id, rundir = request.job_id, execution.rundir
    try:
        document = rundir.read_spec()
        kind = spec_class(document["kind"])
        models = models_for(
            document,
            request,
            execution.warm,
            execution.placement,
            copies=execution.is_resident and kind.queue == TRAIN,
        )
        # Jobs of queue infer run no user code, and several of them share this process.
        folders = document.get("python_path", ()) if kind.queue == TRAIN else None
        with own_modules(folders) if folders is not None else nullcontext():
            result = _run(document, execution, models)
        check_size(result)
        execution.patience.write(events.sync, rundir.path)  # they are on the disk before the result
        write = partial(
            rundir.write_result, result, revision=document["revision"], fence=execution.fence
        )
        execution.patience.write(write, rundir.path)
        peak_bytes = None if execution.is_resident else _peak_bytes()
        events.conclude("finished", result=result, peak_bytes=peak_bytes)
        return JobOutcome(job_id, "finished")
    except Stopped as stopped:
        if control.stop.is_set():
            return _stopped(job_id, control, events, stopped.step)
        events.conclude("stopped", step=stopped.step, reason="reached its last requested step")
        return JobOutcome(job_id, "stopped", reason="cancel")
    except Superseded:
        raise  # nothing more is written here, not even an event
    except RanksLost as error:  # its worker queues the job again
        return JobOutcome(job_id, "lost", error=str(error))
    except BaseException as error:
        lacking = shortage(error, rundir.path)
        if lacking is None:
            return _failed_with(error, job_id, rundir, events)
        if control.stop.is_set():  # the disk is full: what is not saved is computed again
            return _stopped(job_id, control, events, events.step)
        sys.stderr.write(tracebacks.trace(error))  # its own code may be what takes too much
        return lacking_outcome(job_id, lacking)


def _run(document: dict[str, Any], execution: _Execution, models: HorseModels) -> dict[str, Any]:
    """Run the job's kind on its spec; return its result."""
    request, control, events = execution.request, execution.control, execution.events
    rundir = execution.rundir
    spec = spec_class(document["kind"]).parse(document["spec"])
    processes, nodes = getattr(spec, "processes", 1), getattr(spec, "nodes", 1)
    if nodes != (1 if request.gang is None else len(request.gang.nodes)):
        raise JobFailed(f"nodes: must be started on {nodes} nodes: submit the job again")
    check_processes(processes, request, models.placement)
    threads = choose_threads(request.threads, models, processes)
    waited = None
    if request.enqueued_at:
        now = time.time() + request.clock_offset_s
        waited = max(now - request.enqueued_at, 0.0)  # the clock may have been set back
    checkpoints = Checkpoints(
        rundir.checkpoints,
        keep=getattr(spec, "keep", 3),
        best=getattr(spec, "best", None),
        fence=execution.fence,
        on_warning=lambda message: events.emit("warning", message=message),
        before_commit=events.sync,
    )

    def emit(type: str, /, *, step: int | None = None, **fields: Any) -> None:
        events.emit(type, step=step, **fields)
        if type == "begin" and spec.queue == TRAIN:
            _warn_of_lost_events(events, fields.get("resumed_from") or 0)
            _record_source(execution)  # its modules are imported by now

    context = Context(
        job_id=document["id"],
        run_dir=rundir.path,
        device=models.placement.device,
        models=models,
        checkpoints=checkpoints,
        emit=emit,
        stop=control.stop,
        pause=control.pause,
        working=execution.activity.working,
        patiently=execution.patience.write,
        stop_at=document.get("stop_at"),
        code_folders=tuple(document.get("python_path", ())),
        eval_at_stop=bool(document.get("eval_at_stop")),
        queued_s=waited,
        rules=document.get("rules", 0),
        ran_s=_ran_s(spec, execution),
        latest_step=events.latest_step,
        waited_s=lambda: execution.patience.waited_s,
    )
    run = partial(run_of(document["kind"]), spec)
    # None in a resident horse that was forked for another job.
    fork_s = None if request.forked_at is None else time.monotonic() - request.forked_at
    weights = models.weights(getattr(spec, "precision", None))
    check_device(request, rundir, events, models.placement)
    warn_of_changed_weights(request, rundir, events, weights)
    some: dict[str, Any] = {} if request.gang is None else {"nodes": request.gang.nodes}
    if left_out := models.left_out():
        some["left_out"] = left_out
    events.emit(
        "started",
        pid=os.getpid(),
        device=models.placement.device,
        threads=threads,
        queued_s=waited,
        fork_s=fork_s,
        weights=weights,
        **some,
    )
    # The kernel signals a writer of mapped weights to the horse only, not to its children.
    hold = partial(hold_files, execution.warm, request.model)
    if request.gang is not None:
        rendezvous = Rendezvous(request.gang, processes)
        execution.send(GangListening(request.job_id, rendezvous.port))
        met = partial(execution.send, GangMet(request.job_id))
        software = software_of(weights)
        run = partial(run_on_nodes, rendezvous, run, hold, on_met=met, software=software)
    elif processes > 1:
        run = partial(run_in_processes, processes, run, hold)
    try:
        return {**run(context), "weights": weights}
    finally:
        # A stop or an error can leave a save unfinished.
        checkpoints.settle()


def _ran_s(spec: Spec, execution: _Execution) -> float:
    """Return how long earlier executions ran, for a job whose running time is limited."""
    if getattr(spec, "time_limit", None) is None:
        return 0.0
    logged = read(execution.rundir.events)
    return running_s(logged, before=execution.events.execution)


def _warn_of_lost_events(events: EventLog, resumed_from: int) -> None:
    """Warn of steps up to the checkpoint that have no event in the file, nor had one in Redis."""
    if (latest := events.latest_step) < resumed_from:
        events.emit(
            "warning",
            message=f"events: steps {latest + 1} to {resumed_from} are lost (power failure or "
            "changed file); the weights are not affected",
        )


def _record_source(execution: _Execution) -> None:
    rundir, events = execution.rundir, execution.events
    try:
        record = partial(source.record_execution, rundir, events.execution)
        execution.patience.write(record, rundir.path)
    except OSError as error:
        if lacks_space(error):
            raise
        events.emit("warning", message=f"source: not kept: {error}")


def lacking_outcome(job_id: str, lacking: Shortage) -> JobOutcome:
    """Return the outcome of an execution that cannot continue now; the worker runs it later."""
    return JobOutcome(job_id, "lacking", reason=lacking.reason, error=lacking.what)


def _stopped(job_id: str, control: JobControl, events: EventLog, step: int | None) -> JobOutcome:
    """Report that the job has stopped on request after a step."""
    if control.reason == "drain":
        events.conclude("requeued", step=step, reason="the daemon stops")
    elif control.reason == "pause":
        events.conclude("paused", step=step, released=True)
    else:
        events.conclude("stopped", step=step, reason=f"requested: {control.reason}")
    return JobOutcome(job_id, "stopped", reason=control.reason)


def _failed_with(error: BaseException, job_id: str, rundir: RunDir, events: EventLog) -> JobOutcome:
    """Report that the job failed with this error."""
    if isinstance(error, WarmdError):
        # The error is one line that says what to do; its traceback goes to the log.
        reason = tracebacks.cut(str(error), tracebacks.MOST_TRACE)
        cause = error.__cause__
        trace = tracebacks.trace(cause) if cause else None
        return _failed(job_id, rundir, events, reason, logged=trace)
    # Also SystemExit: it ends the job, not the horse.
    text = tracebacks.trace(error)
    reason = tracebacks.reason(error)
    return _failed(job_id, rundir, events, reason, trace=text, logged=text)


def _failed(
    job_id: str,
    rundir: RunDir,
    events: EventLog,
    error: str,
    *,
    trace: str | None = None,
    logged: str | None = None,
) -> JobOutcome:
    """Report that the job failed; `trace` goes into the event, `logged` into the job's log."""
    is_logged = True
    try:
        events.conclude("failed", error=error, traceback=trace)
    except OSError:  # Redis still gets the error
        is_logged = False
    with suppress(OSError), open(rundir.log, "a") as log_file:
        log_file.write(logged or "")
    return JobOutcome(job_id, "failed", error=trace or error, is_logged=is_logged)


def _peak_bytes() -> int:
    """The peak resident memory of this process since its fork, shared memory included."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


class _WaitReporter:
    """Reports what a job waits for: to its worker, and as an event once its log is open."""

    def __init__(self, job_id: str, send: Callable[[Message], None]) -> None:
        self.events: EventLog | None = None
        self._job_id = job_id
        self._send = send
        self._began = 0.0

    def report(self, lacking: Shortage | None) -> None:
        """Report that the job begins to wait, or that it no longer waits."""
        if lacking is not None:
            self._began = time.monotonic()
            self._send(JobWaits(self._job_id, lacking.what, lacking.reason))
            if self.events is not None:
                self.events.announce("waiting", what=lacking.what, reason=lacking.reason)
            return
        self._send(JobWaits(self._job_id, None))
        if self.events is not None:
            self.events.announce("waited", seconds=round(time.monotonic() - self._began, 3))


def _end_processes() -> None:
    """Kill every process that the job has started and left running.

    Otherwise one of them could write to the run directory after the job is resumed.
    """
    gc.collect()  # ends unreferenced multiprocessing pools, which restart killed workers
    limited_processes.end_idle()
    ended = end_descendants()
    if ended:
        log.warning("killed %d processes that the job had left running", ended)
