"""The next actions of a group: jobs that a killed client left, comparisons, trials, stages."""

from __future__ import annotations

from ..lifecycle.places import Places
from . import halving, search, stages
from .curriculum import CurriculumFolder
from .folder import RUNNING
from .members import submit_all
from .sweep import SweepFolder


def advance(places: Places, folder: SweepFolder | CurriculumFolder) -> None:
    """Do the due actions of a group; it becomes inactive when none is left. Raises RedisError."""
    with folder.changing():
        if isinstance(folder, SweepFolder):
            is_active = _advance_sweep(places, folder)
        else:
            is_active = stages.proceed(places, folder)
        folder.set_active(is_active)


def _advance_sweep(places: Places, folder: SweepFolder) -> bool:
    submit_all(places, folder)
    sweep, state = folder.read(), folder.state()
    if state.phase != RUNNING:
        return False
    if sweep.search is not None:
        return search.proceed(places, folder, sweep, sweep.search)
    return halving.proceed(places, folder, sweep, state)
