"""What is due in a sweep: jobs that an interrupted client has left, a comparison, a new trial."""

from __future__ import annotations

from pathlib import Path

from ..queue.jobs import JobStore
from . import halving, search
from .folder import RUNNING, SweepFolder
from .members import submit_all


def advance(store: JobStore, runs: Path, folder: SweepFolder) -> None:
    """Do what is due in a sweep; it becomes inactive when nothing is left. Raises RedisError."""
    with folder.changing():
        submit_all(store, runs, folder)
        sweep, state = folder.read(), folder.state()
        is_active = False
        if state.phase == RUNNING and sweep.search is not None:
            is_active = search.proceed(store, runs, folder, sweep, sweep.search)
        elif state.phase == RUNNING:
            is_active = halving.proceed(store, runs, folder, sweep, state)
        folder.set_active(is_active)
