"""What a job needs before it runs: its models, device, processes and threads; with checks of them.

The first node of a job (execution.py) and the others (following.py) need it alike.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from ...configs.gpus import AUTO, CPU
from ...configs.values import num_cores
from ...jobs import KINDS, run_function, spec_class
from ...jobs.errors import JobFailed
from ...jobs.files import umask
from ...jobs.libraries import versions
from ..host.messages import LocalModel, RunJob
from ..runs.events import EventLog, read
from ..runs.rundir import RunDir
from .horse_models import HorseModels
from .models import WarmModels
from .placement import Placement

log = logging.getLogger(__name__)

# Models with fewer parameters are slower with several threads than with one.
_SMALL_MODEL = 20_000_000


def hold_files(warm: WarmModels, model: LocalModel | None) -> None:
    """Protect the mapped weights against writers of the model's files; see held_files.

    Python runs the signal handler in the main thread, which is the one that trains: the weights
    do not change while they are copied. A horse with several threads only reads them.
    """

    def keep(*_: Any) -> None:
        try:
            warm.keep_as_mapped()
        except MemoryError:
            log.exception("horse: its model's files are being changed: no memory for a copy")
            os._exit(1)  # it would compute with the changed weights

    signal.signal(signal.SIGIO, keep)
    warm.hold_in_fork(None if model is None else model.config.name)
    keep()  # for a writer that came before the handler was set


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
