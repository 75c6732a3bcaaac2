"""The process of groups: `python -m warmd.daemon.curriculum HOME PARENT`, settings on stdin.

It submits what an interrupted client has left, lets the best points of sweeps continue, and takes
curricula from stage to stage. The supervisor starts it while a group is active; it ends when none
is.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import redis

from ...jobs.errors import WarmdError
from ..host.home import Home
from ..host.messages import GroupSettings, decode
from ..host.parent_death import end_with_parent
from ..lifecycle.places import Places
from ..queue import keys
from ..queue.jobs import JobStore
from ..store.remote import RemoteRuns
from ..sweeps import group, progress
from ..sweeps.folder import SweepFolder
from . import stages
from .folder import CurriculumFolder

_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


def main() -> None:
    """Advance all active groups until there is none."""
    end_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = decode(sys.stdin.buffer.read())
    assert isinstance(settings, GroupSettings)
    home = Home(Path(sys.argv[1]))
    remote = None if settings.runs is None else RemoteRuns(home, settings.runs)
    places = Places(home, JobStore(keys.connect(settings.url)), remote)
    problems: dict[str, str] = {}  # of the latest iteration, by group
    while found := list(_active(places)):
        for group_id, advance in found:
            problem = ""
            try:
                advance()
            except (WarmdError, OSError, redis.RedisError) as error:
                # A full disk, a Redis that restarts, a group that was removed: tried again.
                problem = str(error)
                if problem != problems.get(group_id):
                    log.warning("%s: %s", group_id, problem)
            except Exception as error:  # a damaged group must not stop the others
                problem = repr(error)
                if problem != problems.get(group_id):
                    log.exception("%s: cannot be advanced", group_id)
            problems[group_id] = problem
        time.sleep(_INTERVAL_S)


def _active(places: Places) -> Iterator[tuple[str, Callable[[], None]]]:
    """Yield the id of each active group, and the function for its due actions."""
    home = places.home
    for one in group.active(home.sweeps):
        yield one, partial(progress.advance, places, SweepFolder(home, one))
    for one in group.active(home.curricula):
        yield one, partial(stages.advance, places, CurriculumFolder(home, one))


if __name__ == "__main__":
    main()
