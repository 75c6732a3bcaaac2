"""Submission of a sweep's members: each exactly once, also if it is interrupted and repeated.

The client submits them; the sweep's process submits the rest after a client was killed. Both hold
the lock of the sweep.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from ...configs.config import ModelConfig
from ...configs.labels import with_ranks
from ...jobs import spec_class
from ..queue import adoption
from ..queue.jobs import JobStore
from ..runs import labels, source, weights
from ..runs.labels import Labels
from ..runs.rundir import RunDir
from ..runs.weights import Weights
from .folder import Member, Sweep, SweepFolder


def submit_all(store: JobStore, runs: Path, folder: SweepFolder) -> None:
    """Queue all members that are not in Redis yet; within `folder.changing`. Raises RedisError."""
    state = folder.state()
    if state.is_submitted:
        return
    sweep = folder.read()
    for number, member in enumerate(state.members[state.submitted :], state.submitted + 1):
        _submit(store, runs, folder, sweep, member, number)
    folder.update(is_submitted=True)


def _submit(
    store: JobStore, runs: Path, folder: SweepFolder, sweep: Sweep, member: Member, number: int
) -> None:
    """Queue a member unless Redis has it. Its run directory is complete before that."""
    if store.fetch(member.id) is not None:
        return
    document = document_of(sweep, member)
    queueing = adoption.queueing(folder.home, store.connection, sweep.queueing)
    if not folder.init.is_dir():
        document |= queueing  # else after the weights: without it nothing adopts the job
    rundir = RunDir.ensure(runs, member.id, document)
    name = None if sweep.name is None else f"{sweep.name}/{number}"
    labels.write(rundir, Labels(name=name, tags=(*sweep.tags, sweep.id)))
    for folder_submitted_from in sweep.document["python_path"]:
        source.record_submission(rundir, rundir.read_spec()["spec"], Path(folder_submitted_from))
    if folder.init.is_dir():
        own = rundir.path / "init"
        shutil.rmtree(own, ignore_errors=True)  # of a process that was killed
        weights.link(Weights(sweep.document["init_from"], folder.init), own)
        # Models are identified by name: see Submitting.submit.
        model = ModelConfig(name=f"{member.id}:init", path=str(own)).__dict__
        rundir.annotate(model=model, **queueing)
    how = dict(sweep.queueing)
    at = how.pop("at")
    how["needs"] = with_ranks(how.get("needs"), rundir.read_spec()["spec"])
    store.enqueue(
        member.id,
        spec_class(sweep.kind).queue,
        at=None if at is None else datetime.fromisoformat(at),
        from_cli=sweep.origin == "cli",
        **how,
    )


def changes_of(base: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a job that are not those of its sweep."""
    return {name: value for name, value in options.items() if base.get(name) != value}


def document_of(sweep: Sweep, member: Member) -> dict[str, Any]:
    """Return the content of a member's spec.json."""
    document = {
        **sweep.document,
        "spec": {**sweep.document["spec"], **member.changes},
        "origin": sweep.origin,
        "sweep": sweep.id,
    }
    if len(sweep.rungs) > 1:
        document |= {"stop_at": sweep.rungs[0], "eval_at_stop": True}
    return document
