"""The process of sweeps: `python -m warmd.daemon.sweeps HOME PARENT`, its settings on stdin.

It submits what an interrupted client has left, and lets the best points of a sweep continue. The
supervisor starts it while a sweep is active; it ends when none is.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import redis

from ...jobs.errors import WarmdError
from ..host.home import Home
from ..host.messages import SweepSettings, decode
from ..host.parent_death import end_with_parent
from ..queue import keys
from ..queue.jobs import JobStore
from .folder import SweepFolder, active
from .halving import advance

_INTERVAL_S = 1.0

log = logging.getLogger(__name__)


def main() -> None:
    """Advance all active sweeps until there is none."""
    end_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = decode(sys.stdin.buffer.read())
    assert isinstance(settings, SweepSettings)
    home, store = Home(Path(sys.argv[1])), JobStore(keys.connect(settings.url))
    while found := active(home):
        for sweep_id in found:
            try:
                advance(store, home.runs, SweepFolder(home, sweep_id))
            except (WarmdError, OSError, redis.RedisError) as error:
                # A full disk, a Redis that restarts, a sweep that was removed: tried again.
                log.warning("%s: %s", sweep_id, error)
        time.sleep(_INTERVAL_S)


if __name__ == "__main__":
    main()
