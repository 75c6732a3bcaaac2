"""Search: trials of a sweep whose values are chosen by the scores of those before them.

A new trial is on disk before its jobs are queued, and so are the scores that it was chosen by. The
choice depends on them alone: after a crash the same trial is chosen again.
"""

from __future__ import annotations

import logging
from typing import Any

from ...jobs import spec_class
from ...jobs.errors import SpecError
from ...jobs.ids import fresh_id
from ..lifecycle.places import Places
from ..queue.jobs import ENDED
from . import study
from .grid import variant
from .members import changes_of, submit_all
from .scores import mean, score
from .sweep import Member, Search, State, Sweep, SweepFolder

log = logging.getLogger(__name__)


def proceed(places: Places, folder: SweepFolder, sweep: Sweep, search: Search) -> bool:
    """Score the trials that have ended and queue new ones; return whether more follow."""
    state = folder.state()
    known: dict[int, float | None] = {int(p): value for p, value in state.scores.items()}
    scores = known | _ended(places, sweep, state, known)
    running = len(state.points) - len(scores)
    number = min(search.parallel - running, search.trials - len(state.points))
    if number > 0:
        points = study.ask(sweep, search, state, scores, number)
        members = [
            member
            for index, values in enumerate(points, len(state.points))
            for member in _members(sweep, index, values)
        ]
        state = folder.update(
            points=[*state.points, *points],
            scores=_kept(scores),
            submitted=len(state.members),
            members=[*state.members, *members],
            is_submitted=False,
        )
        for values in points:
            log.info("%s: trial %s", sweep.id, values)
        submit_all(places, folder)
    elif scores != known:
        state = folder.update(scores=_kept(scores))
    if scores != known or number > 0:
        study.write(folder.path / study.FILE, sweep, search, state, scores)
    return len(scores) < search.trials


def _kept(scores: dict[int, float | None]) -> dict[str, float]:
    """What is stored: a trial that failed may still succeed, when its jobs are resumed."""
    return {str(point): value for point, value in scores.items() if value is not None}


def _ended(
    places: Places, sweep: Sweep, state: State, known: dict[int, float | None]
) -> dict[int, float | None]:
    """The scores of the points that have ended since: the mean over their seeds.

    None if a seed has none, because its job failed, was canceled or removed.
    """
    found: dict[int, float | None] = {}
    open_points = [point for point in range(len(state.points)) if point not in known]
    members = state.members_of(open_points)
    jobs = places.store.fetch_many([member.id for member in members])
    ended = {
        member.id: job
        for member, job in zip(members, jobs, strict=True)
        if job is None or job.get_status(refresh=False) in ENDED
    }
    for point in open_points:
        ids = [member.id for member in members if member.point == point]
        if ended.keys() >= set(ids):
            for one in ids:
                if (job := ended[one]) is not None:  # it may have run on another machine
                    places.refresh_ended(job)
            values = [score(places.rundir(one), sweep.metric, sweep.steps) for one in ids]
            scored = [value for value in values if value is not None]
            found[point] = mean(scored) if len(scored) == len(values) else None
    return found


def _members(sweep: Sweep, point: int, values: dict[str, Any]) -> list[Member]:
    """The jobs of a trial; none if the options do not go together."""
    base = sweep.document["spec"]
    spec = spec_class(sweep.kind)
    found = []
    for number in range(sweep.seeds):
        try:
            options = spec.parse(variant(base, values, number)).to_json()
        except SpecError as error:
            log.warning("%s: trial %s is left out: %s", sweep.id, values, error)
            return []
        found.append(Member(fresh_id(sweep.kind), point, changes_of(base, options)))
    return found
