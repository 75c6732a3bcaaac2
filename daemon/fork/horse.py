"""The work horse: a process forked by the zygote that runs a job and ends by os._exit.

With isolation "resident" it runs several jobs, one after another or in threads. It writes the run
directory, and reports events and the outcome to its worker (worker_connection.py). Processes that
the job's own code starts end with the job (host/descendants.py).
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ...jobs.compute.allocator import keep_freed_memory
from ...jobs.files.atomic import release
from ...jobs.files.shortage import (
    Patience,
    Shortage,
    lacks_space,
    no_process,
    shortage,
)
from ...jobs.user_code import limited_processes
from ..host.channel import Channel
from ..host.descendants import adopt_orphans, end_descendants
from ..host.messages import (
    HorsePlan,
    HorseStarted,
    JobActivity,
    JobEvent,
    JobOutcome,
    JobWaits,
    LocalModel,
    Message,
    RetireHorse,
    RunJob,
)
from ..host.stacks import write_stacks_on_signal
from ..runs.events import EventLog
from ..runs.fence import Fence, Superseded
from ..runs.rundir import RunDir
from .activity import ActivityReporter
from .execution import Execution, execute, lacking_outcome
from .following import follow
from .idle_memory import IdleMemory
from .job_output import survive_full_disks
from .models import WarmModels
from .own_device import OwnDevice, own_device, start_libraries
from .placement import Placement
from .standby import wait_for_job
from .worker_connection import JobControl, WorkerConnection

log = logging.getLogger(__name__)


def stand_by(sock: socket.socket, plan: HorsePlan, models: WarmModels) -> None:
    """Make the device ready, wait for a job, and run it. Called in the forked child."""
    _become_process(plan)
    own = own_device(plan.device, plan.gpu_memory / 100)
    start_libraries(own)
    channel, request = wait_for_job(sock)
    with _shortage_reported(channel, request):
        _run_jobs(channel, request, models, own)


def run_jobs(channel: Channel, request: RunJob, models: WarmModels) -> None:
    """Run the requested job and, if resident, the jobs after it. Called in the forked child."""
    with _shortage_reported(channel, request):
        _become_process(request.plan)
        _run_jobs(channel, request, models, None)


@contextmanager
def _shortage_reported(channel: Channel, request: RunJob) -> Iterator[None]:
    """Report to the worker that the horse cannot run: no thread or descriptor is free."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        lacking = shortage(error)
        if lacking is None:
            raise
        channel.send(lacking_outcome(request.job_id, lacking))


def _become_process(plan: HorsePlan) -> None:
    os.setpgid(0, 0)
    os.nice(plan.niceness)
    adopt_orphans()
    write_stacks_on_signal()
    _prefer_for_oom_kill()
    keep_freed_memory()
    survive_full_disks()


def _run_jobs(channel: Channel, request: RunJob, models: WarmModels, own: OwnDevice | None) -> None:
    """`own`: the device, where it has been chosen."""
    connection = WorkerConnection(channel, request, unload_model=models.unload_in_fork)
    connection.send(HorseStarted(os.getpid()))
    _hold_files(models, request.model)
    own = own or own_device(request.device, request.gpu_memory / 100)
    placement = Placement(own.name, problem=own.problem, copy_threads=request.copy_threads)
    is_resident = request.isolation == "resident"
    if is_resident and request.slots > 1:
        _run_in_threads(connection, models, placement)
    memory = IdleMemory()
    while True:
        job, control = connection.next_request()
        _run_one(connection, job, control, models, placement, is_resident=is_resident)
        if not is_resident:
            return
        _retire_if_grown(connection, memory)


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
    memory = IdleMemory()

    def run(job: RunJob, control: JobControl) -> None:
        _run_one(connection, job, control, models, placement, is_resident=True, own_output=False)
        _retire_if_grown(connection, memory)

    while True:
        job, control = connection.next_request()
        thread = threading.Thread(target=run, args=(job, control), name=job.job_id, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the machine can start no thread
            connection.drop_job(job.job_id)
            connection.send(lacking_outcome(job.job_id, no_process(str(error))))


def _retire_if_grown(connection: WorkerConnection, memory: IdleMemory) -> None:
    """Ask the worker for no more jobs if the jobs until now have left much memory behind."""
    if connection.is_idle and memory.has_grown():
        connection.send(RetireHorse())


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
    # The kernel signals a writer to the horse only, not to its children.
    hold_files = partial(_hold_files, models, request.model)
    reporter = _WaitReporter(job_id, connection.send)
    patience = Patience(control.stop, on_change=reporter.report)
    try:
        if own_output:
            patience.write(lambda: _redirect_output(rundir.log), rundir.path)
        lock = patience.write(rundir.lock, rundir.path) if request.is_first_node else None
        try:
            if lock is None:
                outcome = follow(request, models, placement, connection.send, hold_files)
            else:
                outcome = _run_and_write(
                    connection,
                    request,
                    control,
                    models,
                    placement,
                    reporter,
                    patience,
                    is_resident=is_resident,
                    hold_files=hold_files,
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


def _run_and_write(
    connection: WorkerConnection,
    request: RunJob,
    control: JobControl,
    models: WarmModels,
    placement: Placement,
    reporter: _WaitReporter,
    patience: Patience,
    *,
    is_resident: bool,
    hold_files: Callable[[], None],
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
        return execute(
            Execution(request, control, fence, events, activity, connection.send, patience.write),
            models,
            placement,
            is_resident=is_resident,
            hold_files=hold_files,
        )


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
