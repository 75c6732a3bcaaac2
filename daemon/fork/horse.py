"""The work horse: a process forked by the zygote that runs a job and ends by os._exit.

With isolation "resident" it runs several jobs, one after another or in threads. It writes the run
directory, and reports events and the outcome to its worker (worker_connection.py). Processes that
the job's own code starts end with the job (host/descendants.py).
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from ...configs.gpus import AUTO, CPU
from ...configs.queues import TRAIN
from ...configs.values import num_cores
from ...jobs import run_function, spec_class
from ...jobs.compute.allocator import keep_freed_memory
from ...jobs.context import Context
from ...jobs.errors import JobFailed, Stopped, WarmdError
from ...jobs.files.atomic import release
from ...jobs.models import chat_templates
from ...jobs.user_code import tracebacks
from ...jobs.user_code.modules import own_modules
from ..host.channel import Channel, check_size
from ..host.descendants import adopt_orphans, end_descendants
from ..host.messages import (
    HorsePlan,
    HorseStarted,
    JobActivity,
    JobEvent,
    JobOutcome,
    LocalModel,
    RunJob,
)
from ..host.stacks import write_stacks_on_signal
from ..runs import source
from ..runs.checkpoints import Checkpoints
from ..runs.events import EventLog, read
from ..runs.fence import Fence, Superseded
from ..runs.rundir import RunDir
from .activity import ActivityReporter
from .horse_models import HorseModels
from .models import WarmModels
from .own_device import OwnDevice, own_device, start_libraries
from .placement import Placement
from .rank_processes import run_in_processes
from .standby import wait_for_job
from .worker_connection import JobControl, WorkerConnection

log = logging.getLogger(__name__)

# Models with fewer parameters are slower with several threads than with one.
_SMALL_MODEL = 20_000_000


def stand_by(sock: socket.socket, plan: HorsePlan, models: WarmModels) -> None:
    """Make the device ready, wait for a job, and run it. Called in the forked child."""
    _become_process(plan)
    own = own_device(plan.device, plan.gpu_memory / 100)
    start_libraries(own)
    channel, request = wait_for_job(sock)
    _run_jobs(channel, request, models, own)


def run_jobs(channel: Channel, request: RunJob, models: WarmModels) -> None:
    """Run the requested job and, if resident, the jobs after it. Called in the forked child."""
    _become_process(request.plan)
    _run_jobs(channel, request, models, None)


def _become_process(plan: HorsePlan) -> None:
    os.setpgid(0, 0)
    os.nice(plan.niceness)
    adopt_orphans()
    write_stacks_on_signal()
    _prefer_for_oom_kill()
    keep_freed_memory()


def _run_jobs(channel: Channel, request: RunJob, models: WarmModels, own: OwnDevice | None) -> None:
    """`own`: the device, where it has been chosen."""
    connection = WorkerConnection(channel, request, forget_model=models.forget_in_fork)
    connection.send(HorseStarted(os.getpid()))
    _hold_files(models, request.model)
    own = own or own_device(request.device, request.gpu_memory / 100)
    placement = Placement(own.name, problem=own.problem, copy_threads=request.copy_threads)
    is_resident = request.isolation == "resident"
    if is_resident and request.slots > 1:
        _run_in_threads(connection, models, placement)
    while True:
        job, control = connection.next_request()
        _run_one(connection, job, control, models, placement, is_resident=is_resident)
        if not is_resident:
            return


def _hold_files(models: WarmModels, model: LocalModel | None) -> None:
    """Protect the mapped weights against writers of the model's files; see held_files.

    Python runs the signal handler in the main thread, which is the one that trains: the weights
    do not change while they are copied. A horse with several threads only reads them.
    """

    def keep(*_: Any) -> None:
        try:
            models.keep_as_mapped()
        except MemoryError:
            log.exception("horse: its model's files are being changed: no memory for a copy")
            os._exit(1)  # it would compute with the changed weights

    signal.signal(signal.SIGIO, keep)
    models.hold_in_fork(None if model is None else model.config.name)
    keep()  # for a writer that came before the handler was set


def _run_in_threads(connection: WorkerConnection, models: WarmModels, placement: Placement) -> None:
    """Run each job in its own thread, all on the same models. Never returns."""
    os.dup2(2, 1)  # output of several jobs cannot be separated: it goes to the daemon's log
    while True:
        job, control = connection.next_request()
        run = partial(
            _run_one,
            connection,
            job,
            control,
            models,
            placement,
            is_resident=True,
            own_output=False,
        )
        threading.Thread(target=run, name=job.job_id, daemon=True).start()


def _run_one(
    connection: WorkerConnection,
    request: RunJob,
    control: JobControl,
    models: WarmModels,
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
    try:
        if own_output:
            _redirect_output(rundir.log)
        lock = rundir.lock()
        try:
            fence = Fence(rundir.path, request.execution)
            fence.claim()
            events = EventLog(
                rundir.events,
                execution=request.execution,
                clock_offset_s=request.clock_offset_s,
                publish=lambda event: connection.send(JobEvent(job_id, event)),
            )
            activity = ActivityReporter(lambda now: connection.send(JobActivity(job_id, now)))
            with events, activity:
                outcome = _execute(
                    request, control, fence, events, activity, models, placement, is_resident
                )
        finally:
            release(lock)
            if own_output:  # the horse runs no other job
                _end_processes()
    except Superseded as error:
        log.warning("%s", error)
        outcome = JobOutcome(job_id, "stopped", reason="superseded")
    except OSError as error:  # its files cannot be written
        outcome = JobOutcome(job_id, "failed", error=f"run directory: {error}", is_logged=False)
    sys.stdout.flush()
    sys.stderr.flush()
    connection.forget(job_id)
    connection.send(outcome)


def _end_processes() -> None:
    """Kill every process that the job has started and left running.

    Otherwise one of them could write to the run directory after the job is resumed.
    """
    gc.collect()  # ends unreferenced multiprocessing pools, which restart killed workers
    chat_templates.end_processes()
    ended = end_descendants()
    if ended:
        log.warning("killed %d processes that the job had left running", ended)


def _execute(
    request: RunJob,
    control: JobControl,
    fence: Fence,
    events: EventLog,
    activity: ActivityReporter,
    warm: WarmModels,
    placement: Placement,
    is_resident: bool,
) -> JobOutcome:
    """Run the job; turn every way in which it can end into an event and an outcome."""
    job_id, rundir = request.job_id, RunDir(fence.folder)
    try:
        document = rundir.read_spec()
        kind = spec_class(document["kind"])
        names = {}
        if request.model is not None:
            names[document["spec"]["model"]] = request.model.config.name
            warm.attach_in_fork(request.model)
        models = HorseModels(
            warm,
            names,
            copies=is_resident and kind.queue == TRAIN,
            takes_adapters=kind.takes_adapters,
            placement=placement,
        )
        # Jobs of queue infer run no user code, and several of them share this process.
        folders = document.get("python_path", ()) if kind.queue == TRAIN else None
        with own_modules(folders) if folders is not None else nullcontext():
            result = _run(document, request, control, fence, events, activity, warm, models)
        check_size(result)
        rundir.write_result(result, revision=document["revision"], fence=fence)
        events.emit("finished", result=result, peak_bytes=None if is_resident else _peak_bytes())
        return JobOutcome(job_id, "finished", result=result)
    except Stopped as stopped:
        if not control.stop.is_set():
            events.emit("stopped", step=stopped.step, reason="reached its last requested step")
            return JobOutcome(job_id, "stopped", reason="cancel")
        if control.reason == "drain":
            events.emit("requeued", step=stopped.step, reason="the daemon stops")
        elif control.reason == "pause":
            events.emit("paused", step=stopped.step, released=True)
        else:
            events.emit("stopped", step=stopped.step, reason=f"asked to {control.reason}")
        return JobOutcome(job_id, "stopped", reason=control.reason)
    except Superseded:
        raise  # nothing more is written here, not even an event
    except WarmdError as error:
        # The error is one line that says what to do; its traceback goes to the log.
        reason = tracebacks.cut(str(error), tracebacks.MOST_TRACE)
        cause = error.__cause__
        trace = tracebacks.trace(cause) if cause else None
        return _failed(job_id, rundir, events, reason, logged=trace)
    except BaseException as error:  # also SystemExit: it ends the job, not the horse
        text = tracebacks.trace(error)
        reason = tracebacks.reason(error)
        return _failed(job_id, rundir, events, reason, trace=text, logged=text)


def _warn_of_changed_weights(
    request: RunJob, rundir: RunDir, events: EventLog, weights: dict[str, str] | None
) -> None:
    """Warn if the model's files changed since it was loaded, or since the job first started."""
    if weights is None:
        return
    if request.is_model_changed:
        events.emit("warning", message="model: its files have changed, so it was loaded again")
    if request.execution > 1:
        started = (e for e in read(rundir.events) if e["type"] == "started" and e.get("weights"))
        before = next((event["weights"]["digest"] for event in started), weights["digest"])
        if before != weights["digest"]:
            events.emit(
                "warning",
                message="model: its files have changed since this job began: digest is "
                f"{weights['digest']}, was {before}",
            )


def _check_device(request: RunJob, rundir: RunDir, events: EventLog, placement: Placement) -> None:
    """Warn of a GPU that cannot be used. Raises JobFailed for a job that must have one."""
    if placement.device != CPU or request.device == CPU:
        return
    reason = placement.problem or "CUDA finds none"
    if request.device != AUTO:
        raise JobFailed(f"device: must be a GPU that can be used, got {request.device}: {reason}")
    if request.execution > 1:
        started = (e for e in read(rundir.events) if e["type"] == "started")
        # Earlier versions did not record it, and none of their jobs had run on a GPU.
        if next((e.get("device", CPU) for e in started), CPU) != CPU:
            raise JobFailed(
                f"device: the job began on a GPU, and there is none now: {reason}; to resume it on "
                f"the CPU set device=cpu for its worker"
            )
    if placement.problem is not None:
        events.emit("warning", message=f"the GPU cannot be used, computing on the CPU: {reason}")


def _run(
    document: dict[str, Any],
    request: RunJob,
    control: JobControl,
    fence: Fence,
    events: EventLog,
    activity: ActivityReporter,
    warm: WarmModels,
    models: HorseModels,
) -> dict[str, Any]:
    """Run the job's kind on its spec; return its result."""
    rundir = RunDir(fence.folder)
    spec = spec_class(document["kind"]).parse(document["spec"])
    processes = getattr(spec, "processes", 1)
    _check_processes(processes, request, models.placement)
    threads = _choose_threads(request.threads, models, processes)
    waited = None
    if request.enqueued_at:
        now = time.time() + request.clock_offset_s
        waited = max(now - request.enqueued_at, 0.0)  # the clock may have been put back
    checkpoints = Checkpoints(
        rundir.checkpoints,
        keep=getattr(spec, "keep", 3),
        best=getattr(spec, "best", None),
        fence=fence,
        on_warning=lambda message: events.emit("warning", message=message),
    )

    def emit(type: str, /, *, step: int | None = None, **fields: Any) -> None:
        events.emit(type, step=step, **fields)
        if type == "begin" and spec.queue == TRAIN:  # by now it has imported its modules
            _record_source(rundir, events)

    context = Context(
        job_id=document["id"],
        run_dir=rundir.path,
        device=models.placement.device,
        models=models,
        checkpoints=checkpoints,
        emit=emit,
        stop=control.stop,
        pause=control.pause,
        working=activity.working,
        stop_at=document.get("stop_at"),
        code_folders=tuple(document.get("python_path", ())),
        eval_at_stop=bool(document.get("eval_at_stop")),
        queued_s=waited,
    )
    run = partial(run_function(document["kind"]), spec)
    # None in a resident horse that was forked for another job.
    fork_s = None if request.forked_at is None else time.monotonic() - request.forked_at
    weights = models.weights(getattr(spec, "precision", None))
    _check_device(request, rundir, events, models.placement)
    _warn_of_changed_weights(request, rundir, events, weights)
    events.emit(
        "started",
        pid=os.getpid(),
        device=models.placement.device,
        threads=threads,
        queued_s=waited,
        fork_s=fork_s,
        weights=weights,
    )
    if processes > 1:
        # What the kernel signals to the horse, its children do not learn.
        hold_files = partial(_hold_files, warm, request.model)
        run = partial(run_in_processes, processes, run, hold_files)
    try:
        return {**run(context), "weights": weights}
    finally:
        # A stop or an error can leave a save unfinished.
        checkpoints.settle()


def _check_processes(processes: int, request: RunJob, placement: Placement) -> None:
    """Raise JobFailed where a job cannot run in so many processes."""
    if processes == 1:
        return
    most = 1
    if sys.platform != "linux":
        reason = "the job ends with any of them on Linux only"
    elif request.isolation == "resident":
        reason = "its worker has isolation=resident"
    elif placement.device != CPU:
        reason = f"the job computes on a GPU, {placement.device}"
    else:
        most, reason = num_cores(), "the cores of this machine"
    if processes > most:
        limit = f"at most {most}" if most > 1 else "1"
        raise JobFailed(f"processes: must be {limit} ({reason}), got {processes}")


def _record_source(rundir: RunDir, events: EventLog) -> None:
    try:
        source.record_execution(rundir, events.execution)
    except OSError as error:
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
        events.emit("failed", error=error, traceback=trace)
        with open(rundir.log, "a") as log_file:
            log_file.write(logged or "")
    except OSError:  # a full disk; Redis may still have room for the error
        is_logged = False
    return JobOutcome(job_id, "failed", error=trace or error, is_logged=is_logged)


def _choose_threads(threads: int | None, models: HorseModels, processes: int) -> int:
    """Set and return the number of threads of each process of a job.

    On one machine it is the same in every execution.
    """
    from ...jobs.compute.threads import compute_with

    if threads is None:
        size = models.num_parameters()
        threads = 1 if size is not None and size < _SMALL_MODEL else num_cores()
    threads = max(threads // processes, 1)
    compute_with(threads)
    return threads


def _peak_bytes() -> int:
    """The most resident memory of this process since its fork, with what it shares."""
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale


def _prefer_for_oom_kill() -> None:
    # When memory runs out, the kernel should kill the job and not the daemon.
    try:
        Path("/proc/self/oom_score_adj").write_text("500")
    except OSError as error:
        log.debug("oom_score_adj: %s", error)


def _redirect_output(path: Path) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
