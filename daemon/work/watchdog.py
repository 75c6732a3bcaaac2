"""Stall detection in the worker: jobs without progress, and the code where they hang.

The horse reports its activity and the time limit for it (fork/activity.py); the worker measures
with its own clock, because a horse that is suspended, or whose code holds the GIL, could not. To
find where it hangs the worker sends a signal: faulthandler then writes the stacks of all threads to
the job's log.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from ...jobs.context import Activity
from ..host import stacks
from ..host.rank_names import ranks_of

_STACK_TIMEOUT_S = 1.0  # for the stacks to be written; a suspended process writes none
_MAX_FRAMES = 6
_MOST_WAITS = 100  # latest waits for a resource, whose time does not count as a stall
_MAX_LOG_BYTES = 1 << 16  # that are searched for the stacks
# The code in which a rank waits for the others.
_EXCHANGE = re.compile(r"/training/(local|gloo)_group\.py:")
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


@dataclass(frozen=True)
class Place:
    """The code that a process of the job executes."""

    rank: int
    pid: int
    stack: str | None  # innermost frames of the main thread
    state: str | None  # of the process, where it wrote no stack

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another rank."""
        innermost = (self.stack or "").partition(" < ")[0]
        return _EXCHANGE.search(innermost) is not None

    def __str__(self) -> str:
        where = f"hangs in {self.stack}" if self.stack else f"is in state {self.state}"
        return f"rank {self.rank} (process {self.pid}) {where}"


@dataclass(frozen=True)
class Stall:
    """The fields of a `stall` event."""

    activity: str
    seconds: float
    median_s: float | None
    stack: str | None  # of the horse
    state: str | None
    ranks: list[Place]  # of several processes, those that the others wait for
    message: str | None  # the same in words


class Watchdog:
    """Watches one execution of a job."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._activity: Activity | None = None
        self._asked: list[tuple[int, int]] | None = None  # ranks whose stacks are still wanted
        self._places: list[Place] = []  # of the ranks before
        self._signaled_at = 0.0  # when the stacks of the first of them were requested
        self._is_reported = False
        self._log_bytes = 0  # size of the log before that
        self._previous_stack: str | None = None  # at the previous check
        self._waits: deque[tuple[float, float]] = deque(maxlen=_MOST_WAITS)  # begin and end
        self._waiting_since: float | None = None  # begin of the current wait for a resource

    @property
    def ends_job(self) -> bool:
        """Whether a stall of the current activity ends the job."""
        return self._activity is not None and self._activity.ends_job

    def set_activity(self, activity: Activity | None) -> None:
        """Set the current activity of the job; None: nothing with a time limit."""
        self._activity, self._asked, self._is_reported = activity, None, False

    def set_waiting(self, is_waiting: bool) -> None:
        """Set whether the job waits for a resource that the machine lacks, which is no stall."""
        now = time.monotonic()
        if is_waiting and self._waiting_since is None:
            self._waiting_since = now
        elif not is_waiting and self._waiting_since is not None:
            self._waits.append((self._waiting_since, now))
            self._waiting_since = None

    def _waited_s(self, since: float) -> float:
        """Return how long the job has waited since a time."""
        return sum(max(end - max(begin, since), 0.0) for begin, end in self._waits)

    def check(self, pid: int) -> Stall | None:
        """Return a stall of the horse `pid`; each stall is returned once.

        Of a job of several processes the stacks are requested one by one: all write to one log.
        """
        activity = self._activity
        if activity is None or self._is_reported or self._waiting_since is not None:
            return None
        now = time.monotonic()
        if now - activity.began - self._waited_s(activity.began) <= activity.limit_s:
            return None
        if self._asked is None:
            self._asked, self._places = [(0, pid), *ranks_of(pid).items()], []
            self._request_stacks(pid, now)
            return None
        rank, pid = self._asked[0]
        stack = self._stack()
        is_complete = stack is not None and stack == self._previous_stack  # written in pieces
        self._previous_stack = stack
        if not is_complete and now - self._signaled_at < _STACK_TIMEOUT_S:
            return None
        state = None if stack is not None else _state(pid)
        self._places.append(Place(rank, pid, stack, state))
        del self._asked[0]
        if self._asked:
            self._request_stacks(self._asked[0][1], now)
            return None
        self._is_reported = True
        first, has_ranks = self._places[0], len(self._places) > 1
        busy = [place for place in self._places if has_ranks and not place.is_waiting]
        return Stall(
            activity=activity.name,
            seconds=now - activity.began,
            median_s=activity.median_s,
            stack=first.stack,
            state=first.state,
            ranks=busy,
            message="; ".join(map(str, busy)) or None,
        )

    def _request_stacks(self, pid: int, now: float) -> None:
        self._signaled_at, self._previous_stack = now, None
        with contextlib.suppress(FileNotFoundError):
            self._log_bytes = self._log.stat().st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, stacks.SIGNAL)

    def _stack(self) -> str | None:
        """Return the innermost frames of the main thread, as written by faulthandler."""
        try:
            with open(self._log, "rb") as file:
                file.seek(self._log_bytes)
                text = file.read(_MAX_LOG_BYTES).decode(errors="replace")
        except OSError:
            return None
        # The main thread is the oldest, and the last; its frames begin with the innermost.
        _, header, block = text.rpartition("(most recent call first):\n")
        frames = [_FRAME.fullmatch(line) for line in block.splitlines()]
        found = [f"{frame[1]}:{frame[2]} {frame[3]}" for frame in frames if frame is not None]
        return " < ".join(found[:_MAX_FRAMES]) if header and found else None


def _state(pid: int) -> str | None:
    """Return the kernel's state of a process, such as 'T (stopped)'."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return line.split(maxsplit=1)[1]
    return None
