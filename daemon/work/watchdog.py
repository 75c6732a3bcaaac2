"""Notices in the worker that a job has stopped making progress, and where it hangs.

The horse reports what it does and how long that may take (fork/activity.py); from then on its
worker judges by its own clock. A horse that is suspended, or whose code holds the GIL, could not do
so. Nor could it report where it hangs: a signal makes faulthandler write the stacks of all threads
to the job's log.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

from ..host import stacks

_STACK_S = 1.0  # for the stacks to be written; a process that is suspended writes none
_MOST_FRAMES = 6
_MOST_BYTES = 1 << 16  # of the log that are searched for the stacks
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class Watchdog:
    """Watches one execution of a job."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._activity: dict[str, Any] | None = None
        self._asked_at: float | None = None  # when the stacks of this activity were asked for
        self._is_told = False
        self._log_bytes = 0  # of the log before that
        self._stack_before: str | None = None  # as it was when it was looked at before

    @property
    def ends_job(self) -> bool:
        """Whether a stall of the present activity is to end the job."""
        return self._activity is not None and bool(self._activity["ends_job"])

    def hear(self, activity: dict[str, Any] | None) -> None:
        """Take in what the job does from now on; None: nothing is expected of it."""
        self._activity, self._asked_at, self._is_told = activity, None, False

    def look(self, pid: int) -> dict[str, Any] | None:
        """Return the fields of a `stall` event, once for each stall of the horse `pid`."""
        activity = self._activity
        if activity is None or self._is_told:
            return None
        now = time.monotonic()
        if now - activity["began"] <= activity["limit_s"]:
            return None
        if self._asked_at is None:
            self._ask(pid, now)
            return None
        stack = self._stack()
        is_whole = stack is not None and stack == self._stack_before  # it comes in pieces
        self._stack_before = stack
        if not is_whole and now - self._asked_at < _STACK_S:
            return None
        self._is_told = True
        return {
            "activity": activity["name"],
            "seconds": now - activity["began"],
            "median_s": activity["median_s"],
            "stack": stack,
            "state": None if stack is not None else _state(pid),
        }

    def _ask(self, pid: int, now: float) -> None:
        self._asked_at, self._stack_before = now, None
        with contextlib.suppress(FileNotFoundError):
            self._log_bytes = self._log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, stacks.SIGNAL)

    def _stack(self) -> str | None:
        """Return the innermost frames of the main thread, as faulthandler has written them."""
        try:
            with open(self._log, "rb") as file:
                file.seek(self._log_bytes)
                text = file.read(_MOST_BYTES).decode(errors="replace")
        except OSError:
            return None
        # The main thread is the oldest, and the last; its frames begin with the innermost.
        _, header, block = text.rpartition("(most recent call first):\n")
        frames = [_FRAME.fullmatch(line) for line in block.splitlines()]
        found = [f"{frame[1]}:{frame[2]} {frame[3]}" for frame in frames if frame is not None]
        return " < ".join(found[:_MOST_FRAMES]) if header and found else None


def _state(pid: int) -> str | None:
    """Return in words what the kernel says of a process, such as 'T (stopped)'."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.split(maxsplit=1)[1]
    return None
