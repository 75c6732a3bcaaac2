"""What can be done with a group as a whole: its jobs are found, steered, resumed and given up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from ...jobs.errors import Conflict, NotFound
from ...jobs.ids import kind_of
from ..host.home import Home
from ..lifecycle.places import Places
from ..lifecycle.steer import unpause
from ..queue.jobs import ENDED
from . import curriculum
from .curriculum import CurriculumFolder
from .folder import CANCELED, CURRICULUM, PAUSED, RUNNING
from .halving import waits_at_rung
from .members import submit_all
from .sweep import SweepFolder

Folder = SweepFolder | CurriculumFolder


def folder_of(home: Home, group_id: str) -> Folder:
    """Return the folder of a group, which may not exist."""
    is_curriculum = kind_of(group_id) == CURRICULUM
    return CurriculumFolder(home, group_id) if is_curriculum else SweepFolder(home, group_id)


def jobs_of(home: Home, group_id: str) -> list[str]:
    """Return the ids of all jobs of a group, also removed ones, the latest last."""
    return _opened(home, group_id).state().jobs


def to_resume(home: Home, group_id: str) -> list[str]:
    """Return the ids of the jobs that `resume` may queue: of a curriculum, the latest training."""
    state = _opened(home, group_id).state()
    return [state.attempts[-1].job] if isinstance(state, curriculum.State) else state.jobs


def steer(places: Places, group_id: str, phase: str, act: Callable[[str], str]) -> str:
    """Set the phase of a group, then act on each of its jobs that allows it; return the outcomes.

    The phase comes first: the process of groups queues nothing in between. Raises Conflict if there
    is nothing to act on.
    """
    folder = _opened(places.home, group_id)
    with folder.changing():
        if isinstance(folder, SweepFolder):
            submit_all(places, folder)
            jobs = folder.update(phase=phase).jobs
        else:
            _refuse_ended(folder, phase)
            jobs = folder.update(phase=phase, problem=None).jobs
        folder.set_active(phase == RUNNING)
    outcomes = []
    for job_id in jobs:
        with suppress(Conflict, NotFound):  # it has ended, was removed, or was not queued yet
            outcomes.append(act(job_id))
    if isinstance(folder, CurriculumFolder):
        return ", ".join(found for found in outcomes if found != "finished") or phase
    if not outcomes and phase != RUNNING:
        raise Conflict(f"sweep: no job of {group_id} runs or waits")
    return _summary(outcomes, len(jobs))


def resume(places: Places, group_id: str, again: Callable[[str], str]) -> str:
    """Continue a paused group, or queue its jobs that have not done their part, by `again`.

    Jobs of points that were not kept at a rung stay as they are. Returns the outcomes.
    """
    folder = _opened(places.home, group_id)
    if folder.state().phase == PAUSED:
        return steer(places, group_id, RUNNING, partial(unpause, places))
    if isinstance(folder, SweepFolder):
        return steer(places, group_id, RUNNING, _resume_member(places, folder, again))
    state = folder.state()
    if state.phase == curriculum.FINISHED or state.attempts[-1].decision == curriculum.GIVE_UP:
        raise Conflict(f"curriculum: {group_id} has ended: nothing to resume")
    return steer(places, group_id, RUNNING, again)


def close(home: Home, group_id: str) -> tuple[Folder, list[str]]:
    """End a group, so that nothing of it is queued; return its folder, and its jobs, last first."""
    folder = _opened(home, group_id)
    with folder.changing():
        return folder, folder.update(phase=CANCELED).jobs[::-1]


def _opened(home: Home, group_id: str) -> Folder:
    """Return the folder of a group that this version can read. Raises NotFound and Conflict."""
    folder = type(folder_of(home, group_id)).open(home, group_id)
    folder.read()
    return folder


def _refuse_ended(folder: CurriculumFolder, phase: str) -> None:
    now = folder.state().phase
    if phase != RUNNING and now in (curriculum.FINISHED, curriculum.FAILED, phase):
        raise Conflict(f"curriculum: {folder.id} is {now} already")


def _resume_member(
    places: Places, folder: SweepFolder, again: Callable[[str], str]
) -> Callable[[str], str]:
    """Return the function that queues a job of a sweep; it raises Conflict if none is due."""
    sweep, state = folder.read(), folder.state()
    rung = sweep.rungs[len(state.decisions)] if len(sweep.rungs) > 1 else None

    def resume_member(member_id: str) -> str:
        member = next(one for one in state.members if one.id == member_id)
        job = places.store.fetch(member_id)
        is_due = member.point in state.kept
        if job is not None and job.get_status(refresh=False) in ENDED and rung is not None:
            is_due = is_due and not waits_at_rung(places, member, job, rung)
        outcome = again(member_id) if is_due else "finished"
        if outcome == "finished":
            raise Conflict(f"job: {member_id} has nothing left to do")
        return outcome

    return resume_member


def _summary(outcomes: Sequence[str], total: int) -> str:
    """Return how many jobs had which outcome: `canceled 3, stopping 1 of 9 jobs`."""
    counts = {outcome: outcomes.count(outcome) for outcome in dict.fromkeys(outcomes)}
    words = ", ".join(f"{outcome} {number}" for outcome, number in counts.items())
    return f"{words or 'unchanged 0'} of {total} jobs"
