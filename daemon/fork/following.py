"""A node's part of a job whose rank 0 is on another machine: it computes and writes nothing.

It runs the ranks of this machine. Stop and pause requests, events, checkpoints and the result are
rank 0's; the worker ends this process when the execution has ended there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...jobs import spec_class
from ...jobs.context import Context, Never
from ...jobs.errors import Stopped, WarmdError
from ...jobs.user_code import tracebacks
from ...jobs.user_code.modules import own_modules
from ..host.messages import GangMet, JobOutcome, Message, RunJob
from ..runs.checkpoints import Checkpoints
from ..runs.rundir import RunDir
from .before_run import (
    check_processes,
    choose_threads,
    hold_files,
    models_for,
    run_of,
    software_of,
)
from .models import WarmModels
from .placement import Placement
from .rank_processes import RanksLost, run_on_nodes
from .rendezvous import Rendezvous


def follow(
    request: RunJob,
    warm: WarmModels,
    placement: Placement,
    send: Callable[[Message], None],
) -> JobOutcome:
    """Run this node's ranks; return how they ended."""
    job_id = request.job_id
    try:
        _follow(request, warm, placement, send)
    except Stopped:  # rank 0 reports it
        return JobOutcome(job_id, "stopped")
    except RanksLost as error:
        return JobOutcome(job_id, "lost", error=str(error))
    except WarmdError as error:
        reason = tracebacks.cut(str(error), tracebacks.MOST_TRACE)
        return JobOutcome(job_id, "failed", error=reason)
    except BaseException as error:  # also SystemExit, as on the first node
        sys.stderr.write(tracebacks.trace(error))  # the job's log
        return JobOutcome(job_id, "failed", error=tracebacks.reason(error))
    return JobOutcome(job_id, "finished")


def _follow(
    request: RunJob,
    warm: WarmModels,
    placement: Placement,
    send: Callable[[Message], None],
) -> None:
    assert request.gang is not None
    rundir = RunDir(Path(request.run_dir))
    document = rundir.read_spec()
    spec = spec_class(document["kind"]).parse(document["spec"])
    processes = getattr(spec, "processes", 1)
    check_processes(processes, request, placement)
    models = models_for(document, request, warm, placement, copies=False)
    choose_threads(request.threads, models, processes)
    folders = tuple(document.get("python_path", ()))
    context = Context(
        job_id=document["id"],
        run_dir=rundir.path,
        device=placement.device,
        models=models,
        checkpoints=Checkpoints(rundir.checkpoints),
        emit=_emit_nothing,
        stop=Never(),
        code_folders=folders,
        rules=document.get("rules", 0),
    )
    run = partial(run_of(document["kind"]), spec)
    met = partial(send, GangMet(request.job_id))
    with own_modules(folders):
        run_on_nodes(
            Rendezvous(request.gang, processes),
            run,
            partial(hold_files, warm, request.model),
            context,
            on_met=met,
            software=software_of(models.weights(None)),
        )


def _emit_nothing(type: str, /, *, step: int | None = None, **fields: object) -> None:
    """Rank 0 emits the events of the job."""
