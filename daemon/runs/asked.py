"""The latest request about a job after its submission: pause, cancel, continue or resume.

Redis has it too. `queue.json` in the run directory is for the case that Redis loses it, like
`queueing` in spec.json for the options of the submission (see adoption.py). Pause and cancel are
recorded after Redis has them, continue and resume before: after a crash in between the file never
holds a job back that Redis would run.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...jobs.files.atomic import write_atomic
from . import events, fence
from .rundir import RunDir
from .seal import sealed, unsealed

PAUSED, CANCELED, CONTINUED, RESUMED = "paused", "canceled", "continued", "resumed"

NAME = "queue.json"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Asked:
    """The latest request."""

    state: str  # PAUSED, CANCELED, CONTINUED or RESUMED
    seq: int  # number of the job's latest event before the request; 0: there was none
    executions: int  # number of executions that had begun before the request
    at: float  # unix seconds
    front: bool = False  # whether the job goes to the front of the queue


def note(rundir: RunDir, state: str, *, front: bool = False) -> None:
    """Record a request durably; nothing if the run directory is not on this machine.

    If it cannot be written (a full disk), the request holds all the same, and a log line says so.
    """
    if not rundir.path.is_dir():
        return
    latest = next(iter(events.newest(rundir.events, 1)), None)
    seq = 0 if latest is None else int(latest["seq"])
    made = Asked(state, seq, executions(rundir), round(time.time(), 3), front)
    try:
        write_atomic(_path(rundir), sealed(made))
    except OSError as error:
        log.warning("%s: %s: not recorded: %s", rundir.path.name, state, error)
        with suppress(OSError):
            _path(rundir).unlink(missing_ok=True)  # an earlier request no longer holds


def read(rundir: RunDir) -> Asked | None:
    """Return the latest request; None if there is none that can be read."""
    with suppress(OSError, ValueError):
        return unsealed(_path(rundir).read_bytes(), Asked)
    return None


def executions(rundir: RunDir) -> int:
    """Return the number of executions of a job that have begun, by its run directory."""
    latest = next(iter(events.newest(rundir.events, 1)), None)
    logged = 0 if latest is None else int(latest["execution"])
    return max(logged, fence.latest(rundir.path))


def _path(rundir: RunDir) -> Path:
    return rundir.path / NAME
