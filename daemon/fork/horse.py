"""The work horse: a process forked by the zygote that runs a job and ends by os._exit.

With isolation "resident" it runs several jobs, one after another or in threads. Each is an
execution (execution.py), whose events and outcome it reports to its worker (worker_connection.py).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...jobs.compute.allocator import keep_freed_memory
from ...jobs.files.shortage import no_process, shortage
from ..host.channel import Channel
from ..host.descendants import adopt_orphans
from ..host.messages import HorsePlan, HorseStarted, RetireHorse, RunJob
from ..host.stacks import write_stacks_on_signal
from .before_run import hold_files
from .execution import execute, lacking_outcome
from .idle_memory import IdleMemory
from .job_output import survive_full_disks
from .models import WarmModels
from .own_device import OwnDevice, own_device, start_libraries
from .placement import Placement
from .standby import wait_for_job
from .worker_connection import JobControl, WorkerConnection

log = logging.getLogger(__name__)

# How long the thread of one job may hold the GIL while another wants it.
_SWITCH_S = 0.0005


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
    hold_files(models, request.model)
    own = own or own_device(request.device, request.gpu_memory / 100)
    placement = Placement(own.name, problem=own.problem, copy_threads=request.copy_threads)
    is_resident = request.isolation == "resident"
    if is_resident and request.slots > 1:
        _run_in_threads(connection, models, placement)
    memory = IdleMemory()
    while True:
        job, control = connection.next_request()
        execute(connection, job, control, models, placement, is_resident=is_resident)
        if not is_resident:
            return
        _retire_if_grown(connection, memory)


def _run_in_threads(connection: WorkerConnection, models: WarmModels, placement: Placement) -> None:
    """Run each job in its own thread, all on the same models. Never returns."""
    os.dup2(2, 1)  # output of several jobs cannot be separated: it goes to the daemon's log
    sys.setswitchinterval(_SWITCH_S)
    memory = IdleMemory()

    def run(job: RunJob, control: JobControl) -> None:
        execute(connection, job, control, models, placement, is_resident=True, own_output=False)
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


def _prefer_for_oom_kill() -> None:
    # When memory runs out, the kernel should kill the job and not the daemon.
    try:
        Path("/proc/self/oom_score_adj").write_text("500")
    except OSError as error:
        log.debug("oom_score_adj: %s", error)
