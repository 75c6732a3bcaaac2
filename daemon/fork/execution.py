"""One execution of a job in a horse: prepares what its kind needs, runs it, and reports its end."""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...configs.queues import TRAIN
from ...jobs import KINDS, run_function, spec_class
from ...jobs.context import Context, Patiently
from ...jobs.errors import JobFailed, Stopped, WarmdError
from ...jobs.files import umask
from ...jobs.files.shortage import Shortage, lacks_space, shortage
from ...jobs.libraries import versions
from ...jobs.user_code import tracebacks
from ...jobs.user_code.modules import own_modules
from ..host.channel import check_size
from ..host.messages import GangListening, GangMet, JobOutcome, Message, RunJob
from ..runs import source
from ..runs.checkpoints import Checkpoints
from ..runs.events import EventLog
from ..runs.fence import Fence, Superseded
from ..runs.rundir import RunDir
from .activity import ActivityReporter
from .before_run import check_device, check_processes, choose_threads, warn_of_changed_weights
from .horse_models import HorseModels
from .models import WarmModels
from .placement import Placement
from .rank_processes import RanksLost, run_in_processes, run_on_nodes
from .rendezvous import Rendezvous
from .worker_connection import JobControl


@dataclass(frozen=True)
class Execution:
    """A requested execution, the control requests for it, and its run directory."""

    request: RunJob
    control: JobControl
    fence: Fence
    events: EventLog
    activity: ActivityReporter
    send: Callable[[Message], None]  # to the worker
    patiently: Patiently  # repeats writes while the disk is full

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.fence.folder)


def execute(
    execution: Execution,
    warm: WarmModels,
    placement: Placement,
    *,
    is_resident: bool,
    hold_files: Callable[[], None],
) -> JobOutcome:
    """Run the job; report any kind of end as an event and an outcome.

    `is_resident`: this process runs other jobs too. `hold_files` is called in each further process
    of the job, to protect the mapped weights there. Raises Superseded.
    """
    request, control, events = execution.request, execution.control, execution.events
    job_id, rundir = request.job_id, execution.rundir
    try:
        document = rundir.read_spec()
        kind = spec_class(document["kind"])
        models = models_for(
            document, request, warm, placement, copies=is_resident and kind.queue == TRAIN
        )
        # Jobs of queue infer run no user code, and several of them share this process.
        folders = document.get("python_path", ()) if kind.queue == TRAIN else None
        with own_modules(folders) if folders is not None else nullcontext():
            result = _run(document, execution, models, hold_files)
        check_size(result)
        execution.patiently(events.sync, rundir.path)  # they are on the disk before the result
        write = partial(
            rundir.write_result, result, revision=document["revision"], fence=execution.fence
        )
        execution.patiently(write, rundir.path)
        peak_bytes = None if is_resident else _peak_bytes()
        events.conclude("finished", result=result, peak_bytes=peak_bytes)
        return JobOutcome(job_id, "finished", result=result)
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


def _run(
    document: dict[str, Any],
    execution: Execution,
    models: HorseModels,
    hold_files: Callable[[], None],
) -> dict[str, Any]:
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
        patiently=execution.patiently,
        stop_at=document.get("stop_at"),
        code_folders=tuple(document.get("python_path", ())),
        eval_at_stop=bool(document.get("eval_at_stop")),
        queued_s=waited,
        rules=document.get("rules", 0),
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
    if request.gang is not None:
        rendezvous = Rendezvous(request.gang, processes)
        execution.send(GangListening(request.job_id, rendezvous.port))
        met = partial(execution.send, GangMet(request.job_id))
        software = software_of(weights)
        run = partial(run_on_nodes, rendezvous, run, hold_files, on_met=met, software=software)
    elif processes > 1:
        run = partial(run_in_processes, processes, run, hold_files)
    try:
        return {**run(context), "weights": weights}
    finally:
        # A stop or an error can leave a save unfinished.
        checkpoints.settle()


def software_of(weights: dict[str, str] | None) -> dict[str, str | None]:
    """Return what must be equal on all nodes of a job: versions and the model's files."""
    return {**versions(), "model": None if weights is None else weights["digest"]}


def run_of(kind: str) -> Callable[..., dict[str, Any]]:
    """Return the `run` of a kind; another package's is user code and creates files as such."""
    run = run_function(kind)
    return run if kind in KINDS.own else umask.users()(run)


def models_for(
    document: dict[str, Any],
    request: RunJob,
    warm: WarmModels,
    placement: Placement,
    *,
    copies: bool,
) -> HorseModels:
    """Return the models of a job, given its spec.json; `copies` as for HorseModels."""
    names = {}
    if request.model is not None:
        names[document["spec"]["model"]] = request.model.config.name
        warm.attach_in_fork(request.model)
    return HorseModels(
        warm,
        names,
        copies=copies,
        takes_adapters=spec_class(document["kind"]).takes_adapters,
        placement=placement,
    )


def _warn_of_lost_events(events: EventLog, resumed_from: int) -> None:
    """Warn of steps up to the checkpoint that have no event in the file, nor had one in Redis."""
    if (latest := events.latest_step) < resumed_from:
        events.emit(
            "warning",
            message=f"events: steps {latest + 1} to {resumed_from} are lost (power failure or "
            "changed file); the weights are not affected",
        )


def _record_source(execution: Execution) -> None:
    rundir, events = execution.rundir, execution.events
    try:
        record = partial(source.record_execution, rundir, events.execution)
        execution.patiently(record, rundir.path)
    except OSError as error:
        if lacks_space(error):
            raise
        events.emit("warning", message=f"source: not kept: {error}")


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
