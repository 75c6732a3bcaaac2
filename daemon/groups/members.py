"""Submission of a sweep's members: each exactly once, also if it is interrupted and repeated.

The client submits them; the sweep's process submits the rest after a client was killed. Both hold
the lock of the sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..lifecycle import submit
from ..lifecycle.places import Places
from ..lifecycle.queueing import Queueing
from ..runs.weights import Weights
from .sweep import Member, Sweep, SweepFolder


def submit_all(places: Places, folder: SweepFolder) -> None:
    """Queue all members that are not in Redis yet; within `folder.changing`. Raises RedisError."""
    state = folder.state()
    if state.is_submitted:
        return
    sweep = folder.read()
    for number, member in enumerate(state.members[state.submitted :], state.submitted + 1):
        _submit(places, folder, sweep, member, number)
    folder.update(is_submitted=True)


def _submit(places: Places, folder: SweepFolder, sweep: Sweep, member: Member, number: int) -> None:
    """Queue a member unless Redis has it."""
    init = Weights(sweep.document["init_from"], folder.init) if folder.init.is_dir() else None
    name = None if sweep.name is None else f"{sweep.name}/{number}"
    queueing = replace(Queueing.from_json(sweep.queueing), name=name, tags=(*sweep.tags, sweep.id))
    submit.submit_as(places, member.id, document_of(sweep, member), queueing, init=init)


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
