"""Checks and choices of a horse before a job runs: its device, processes, threads and weights."""

from __future__ import annotations

import sys

from ...configs.gpus import AUTO, CPU
from ...configs.values import num_cores
from ...jobs.errors import JobFailed
from ..host.messages import RunJob
from ..runs.events import EventLog, read
from ..runs.rundir import RunDir
from .horse_models import HorseModels
from .placement import Placement

# Models with fewer parameters are slower with several threads than with one.
_SMALL_MODEL = 20_000_000


def warn_of_changed_weights(
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


def check_device(request: RunJob, rundir: RunDir, events: EventLog, placement: Placement) -> None:
    """Warn of a GPU that cannot be used. Raises JobFailed for a job that requires one."""
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


def check_processes(processes: int, request: RunJob, placement: Placement) -> None:
    """Raise JobFailed if this machine cannot run this number of processes of a job."""
    nodes = 1 if request.gang is None else len(request.gang.nodes)
    if processes == nodes == 1:
        return
    reason = None
    if sys.platform != "linux":
        reason = "the job ends with any of them on Linux only"
    elif request.isolation == "resident":
        reason = "its worker has isolation=resident"
    elif placement.device != CPU:
        reason = f"the job computes on a GPU, {placement.device}"
    if reason is not None:
        name, got = ("processes", processes) if processes > 1 else ("nodes", nodes)
        raise JobFailed(f"{name}: must be 1 ({reason}), got {got}")
    if processes > (most := num_cores()):
        limit = f"at most {most}" if most > 1 else "1"
        raise JobFailed(f"processes: must be {limit} (the cores of this machine), got {processes}")


def choose_threads(threads: int | None, models: HorseModels, processes: int) -> int:
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
