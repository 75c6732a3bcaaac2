"""The statuses of a job in words, as commands, pages and programs see them.

`queue/states.py` has the moves between them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

WAITING = ("queued", "scheduled", "deferred")
PENDING = ("started", *WAITING)
ENDED = ("finished", "failed", "stopped", "canceled")
EVERY = ("queued", "started", *ENDED, "deferred", "scheduled")  # all that Redis has

PAUSED = "paused"  # is none of Redis': a paused job has one of PAUSABLE there
PAUSABLE = ("started", "scheduled")
UNREGISTERED = "unregistered"  # a run directory that Redis does not know


def shown(job: Mapping[str, Any]) -> str:
    """Return the status of a job or group, given its fields, as it is shown to people."""
    return PAUSED if job["paused"] else str(job["status"])
