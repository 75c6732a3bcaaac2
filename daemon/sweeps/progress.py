"""The next actions of a sweep: jobs not submitted by a killed client, comparisons, trials."""

from __future__ import annotations

from ..lifecycle.places import Places
from . import halving, search
from .folder import RUNNING, SweepFolder
from .members import submit_all


def advance(places: Places, folder: SweepFolder) -> None:
    """Do the due actions of a sweep; it becomes inactive when none is left. Raises RedisError."""
    with folder.changing():
        submit_all(places, folder)
        sweep, state = folder.read(), folder.state()
        is_active = False
        if state.phase == RUNNING and sweep.search is not None:
            is_active = search.proceed(places, folder, sweep, sweep.search)
        elif state.phase == RUNNING:
            is_active = halving.proceed(places, folder, sweep, state)
        folder.set_active(is_active)
