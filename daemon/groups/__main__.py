"""The process of groups: `python -m warmd.daemon.groups HOME PARENT`, settings on stdin.

It submits what an interrupted client has left, lets the best points of sweeps continue, and takes
curricula from stage to stage. The supervisor starts it while a group is active; it ends when none
is.
"""

from __future__ import annotations

import logging
import sys
import time
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
from . import driver
from .actions import folder_of
from .folder import active

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
    while found := active(home):
        for group_id in found:
            problem = ""
            try:
                driver.advance(places, folder_of(home, group_id))
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


if __name__ == "__main__":
    main()
