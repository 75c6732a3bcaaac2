"""Sweeps as plain values: one line of a list, and the table of points with their scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...jobs.intervals import mean_interval
from ..groups.folder import PAUSED, RUNNING
from ..groups.scores import mean, score
from ..groups.sweep import Member, Search, State, Sweep
from ..lifecycle.statuses import WAITING
from ..runs.rundir import RunDir

_GONE = "removed"  # status of a member without files and record
_WAITS = ("waits_for", "missing_model", "awaited_nodes", "needs")  # what a job waits for


def line_of(
    is_active: bool, sweep: Sweep, state: State, members: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """Return a sweep with the fields of a job that lists show.

    `is_active`: whether the process of groups had something to do before `members` were read.
    `members`: the fields of its jobs, as returned by `Jobs.get`, by id. `step` and
    `steps_total` are sums over all jobs, None with a time limit.
    """
    found = [members[member.id] for member in state.members if member.id in members]
    counts = Counter("paused" if job["paused"] else str(job["status"]) for job in found)
    counts[_GONE] = len(state.members) - len(found)
    etas = [job["eta_s"] for job in found if job["eta_s"] is not None]
    is_ended = not any(counts[status] for status in ("started", "paused", *WAITING))
    ends = [job["ended_at"] for job in found if job["ended_at"] is not None]
    starts = [job["started_at"] for job in found if job["started_at"] is not None]
    return {
        "id": sweep.id,
        "kind": sweep.kind,
        "name": sweep.name,
        "tags": sweep.tags,
        "status": status_of(counts, is_deciding=is_active and state.phase == RUNNING),
        "paused": state.phase == PAUSED,
        "queue": next((job["queue"] for job in found), None),
        "model": next((job["model"] for job in found), None),
        "step": sum(job["step"] for job in found),
        "steps_total": steps_total(sweep, state),
        "rows_done": None,
        "rows_total": None,
        "jobs": len(state.members),
        "statuses": {status: number for status, number in counts.items() if number},
        "error": next((job["error"] for job in found if job["status"] == "failed"), None),
        "problem": None,
        "created_at": sweep.created,
        "started_at": min(starts, default=None),
        "ended_at": max(ends, default=None) if is_ended else None,
        "scheduled_at": None,
        "position": min((job["position"] for job in found if job["position"]), default=None),
        "after": [],
        **{name: next((job[name] for job in found if job[name]), None) for name in _WAITS},
        "eta_s": max(etas, default=None),
    }


def status_of(counts: Mapping[str, int], *, is_deciding: bool) -> str:
    """Return a status of RQ for a sweep, by how many of its jobs have which.

    `is_deciding`: whether its process may still queue jobs.
    """
    waiting = next((status for status in WAITING if counts[status]), None)
    if counts["started"] or (is_deciding and not waiting and not counts["paused"]):
        return "started"
    if waiting or counts["paused"]:
        return waiting or "scheduled"
    for status in ("failed", "canceled"):
        if counts[status]:
            return status
    # Jobs of points that were not kept are stopped, which is how they should end.
    return "finished" if counts["finished"] else "stopped"


def steps_total(sweep: Sweep, state: State) -> int | None:
    """Return the steps of all jobs together, as planned; None: they have a time limit."""
    if not sweep.rungs:
        return None
    points, done, total = sweep.search.trials if sweep.search else len(state.points), 0, 0
    for step in sweep.rungs:
        total += points * sweep.seeds * (step - done)
        points, done = max(points // (sweep.halving or 1), 1), step
    return total


def table_of(
    is_active: bool,
    sweep: Sweep,
    state: State,
    members: Mapping[str, Mapping[str, Any]],
    runs: Path,
) -> dict[str, Any]:
    """Return a sweep with its points: their jobs, scores, and the best one.

    A point has the mean of its scores and, from two seeds on, its 95 % interval (Student's t).
    """
    points = [_point(sweep, state, index, members, runs) for index in range(len(state.points))]
    return {
        **line_of(is_active, sweep, state, members),
        "metric": sweep.metric,
        "lower_is_better": sweep.lower_is_better,
        "halving": sweep.halving,
        "rungs": sweep.rungs,
        "search": None if sweep.search is None else _search(sweep.search),
        "decisions": [decision.__dict__ for decision in state.decisions],
        "points": points,
        "best": best_of(sweep, points),
    }


def _search(search: Search) -> dict[str, Any]:
    ranges = {name: one.text for name, one in search.ranges.items()}
    return {"sampler": search.sampler, "trials": search.trials, "ranges": ranges}


def best_of(sweep: Sweep, points: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the index of the best point; with halving, of those that were trained longest."""
    scored = [(i, point) for i, point in enumerate(points) if point["mean"] is not None]
    if scored and sweep.halving is not None:
        furthest = max(point["step"] for _, point in scored)
        scored = [(i, point) for i, point in scored if point["step"] == furthest]
    sign = 1 if sweep.lower_is_better else -1
    return min(((sign * point["mean"], i) for i, point in scored), default=(0.0, None))[1]


def _point(
    sweep: Sweep,
    state: State,
    index: int,
    members: Mapping[str, Mapping[str, Any]],
    runs: Path,
) -> dict[str, Any]:
    """One point; its scores are those of the last step at which points were compared."""
    of_point = state.members_of([index])
    decided = [d for d in state.decisions if str(index) in d.scores]
    step = _end_of(sweep, of_point, members)
    values = _scores(sweep, of_point, step, runs)
    if not values and decided:
        step = decided[-1].step
        values = _scores(sweep, of_point, step, runs)
    elif not values:
        step = next(iter(sweep.rungs), sweep.steps)
        values = _scores(sweep, of_point, step, runs)
    interval = mean_interval(list(values.values()))
    dropped = next((d.step for d in decided if index not in d.kept), None)
    return {
        "values": state.points[index],
        "step": step if values else 0,
        "n": len(values),
        "mean": mean(values.values()),
        "low": None if interval is None else interval[0],
        "high": None if interval is None else interval[1],
        "dropped_at": dropped,
        "jobs": [_job(sweep, member, members.get(member.id), values) for member in of_point],
    }


def _end_of(
    sweep: Sweep, of_point: Sequence[Member], members: Mapping[str, Mapping[str, Any]]
) -> int:
    """The last step of a point's jobs, which a sweep of `samples` or `epochs` varies."""
    known = [members[one.id]["steps_total"] for one in of_point if one.id in members]
    if sweep.halving is not None:
        return sweep.steps
    return max((steps for steps in known if steps), default=sweep.steps)


def _scores(sweep: Sweep, members: Sequence[Member], step: int, runs: Path) -> dict[str, float]:
    found = {member.id: score(RunDir(runs / member.id), sweep.metric, step) for member in members}
    return {job_id: value for job_id, value in found.items() if value is not None}


def _job(
    sweep: Sweep, member: Member, job: Mapping[str, Any] | None, scores: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "id": member.id,
        "seed": {**sweep.document["spec"], **member.changes}["seed"],
        "status": _GONE if job is None else "paused" if job["paused"] else job["status"],
        "step": None if job is None else job["step"],
        "score": scores.get(member.id),
        "error": None if job is None else job["error"],
    }
