"""Successive halving: at each rung the best points continue, from the checkpoints of their members.

Members are submitted with all steps and a step to stop at, so that the learning-rate schedule is
that of the whole training: a job that reaches the end has computed what it would have computed
without the stops. A decision is on disk before it takes effect. Each effect is conditional on the
state of the job, so an interrupted one can be repeated.
"""

from __future__ import annotations

import logging
import time

from ...jobs.errors import Conflict
from ..lifecycle import resume
from ..lifecycle.places import Places
from ..queue.jobs import ENDED, Job, JobStatus
from ..runs import events
from .scores import mean, score
from .sweep import Decision, Member, State, Sweep, SweepFolder

log = logging.getLogger(__name__)


def proceed(places: Places, folder: SweepFolder, sweep: Sweep, state: State) -> bool:
    """Decide at a rung that is reached; return whether more rungs follow. Raises RedisError."""
    if state.decisions:
        _extend(places, sweep, state)
    if _has_rung(sweep, state) and _have_ended(places, state):
        decision = _decide(places, sweep, state)
        state = folder.update(decisions=[*state.decisions, decision])
        log.info("%s: step %d: %s continue", sweep.id, decision.step, _kept(state))
        _extend(places, sweep, state)
    # Until the best have ended: if Redis loses its latest writes, they are queued again.
    is_extended = bool(state.decisions) and not _have_ended(places, state)
    return _has_rung(sweep, state) or is_extended


def _has_rung(sweep: Sweep, state: State) -> bool:
    """Whether there is another decision to be made."""
    return len(state.decisions) < len(sweep.rungs) - 1 and bool(state.kept)


def _have_ended(places: Places, state: State) -> bool:
    """Whether all members of the kept points have ended, or were removed."""
    jobs = places.store.fetch_many([member.id for member in state.members_of(state.kept)])
    return all(job is None or job.get_status(refresh=False) in ENDED for job in jobs)


def _decide(places: Places, sweep: Sweep, state: State) -> Decision:
    """Rank the points at the rung that all their members have reached, or ended before.

    A point with a member that did not reach the rung, for example because its loss was NaN, ranks
    behind points whose members all did; a point of which no member reached it is not kept.
    """
    step = sweep.rungs[len(state.decisions)]
    scores: dict[int, float | None] = {}
    ranks = {}
    for point in state.kept:
        members = state.members_of([point])
        for member in members:  # it may have run on another machine
            places.refresh(member.id)
        values = [
            value
            for member in members
            if (value := score(places.rundir(member.id), sweep.metric, step)) is not None
        ]
        scores[point] = average = mean(values)
        if average is not None:
            sign = 1 if sweep.lower_is_better else -1
            ranks[point] = (len(members) - len(values), sign * average)
    assert sweep.halving is not None
    best = sorted(ranks, key=lambda point: ranks[point])
    kept = best[: max(len(state.kept) // sweep.halving, 1)]
    return Decision(
        step=step,
        scores={str(point): value for point, value in scores.items()},
        kept=sorted(kept),
        time=round(time.time(), 3),
    )


def _kept(state: State) -> str:
    return ", ".join(str(state.points[point]) for point in state.kept) or "none"


def _extend(places: Places, sweep: Sweep, state: State) -> None:
    """Queue the members of kept points that wait at the rung of the latest decision."""
    reached = sweep.rungs[len(state.decisions) - 1]
    following = sweep.rungs[len(state.decisions)]
    stop_at = None if following == sweep.steps else following
    members = state.members_of(state.kept)
    jobs = places.store.fetch_many([member.id for member in members])
    for member, job in zip(members, jobs, strict=True):
        if job is not None and waits_at_rung(places, member, job, reached):
            _extend_one(places, job, stop_at)


def waits_at_rung(places: Places, member: Member, job: Job, step: int) -> bool:
    """Whether a member has stopped at the step of a rung, not by a request before or after it."""
    if job.get_status(refresh=False) != JobStatus.STOPPED:
        return False
    places.refresh_ended(job)  # it may have run on another machine
    try:
        latest = next(iter(events.newest(places.rundir(member.id).events, 1)), None)
    except FileNotFoundError:  # it was removed
        return False
    return latest is not None and latest["type"] == "stopped" and latest["step"] == step


def _extend_one(places: Places, job: Job, stop_at: int | None) -> None:
    rundir = places.rundir(job.id)
    try:
        with rundir.revising():
            rundir.annotate(stop_at=stop_at)
            resume.queue_again(places, job)
    except (Conflict, FileNotFoundError) as error:  # it was removed just now
        log.warning("%s: cannot be extended: %s", job.id, error)
