"""The running time of an execution, its limit, and the deadline for a job that is to stop."""

from __future__ import annotations

import time


class TimeLimit:
    """Measures the running time of one execution, from now on."""

    def __init__(self, limit_s: float | None) -> None:
        """`limit_s`: the longest running time; None: no limit."""
        self.limit_s = limit_s
        self._began = time.monotonic()
        self._idle: set[str] = set()  # why its time does not count: "paused", "waiting"
        self._idle_since = 0.0
        self._idle_s = 0.0
        self._deadline: float | None = None

    def set_idle(self, why: str, is_idle: bool) -> None:
        """Set whether the time does not count for this reason."""
        now = time.monotonic()
        if self._idle:
            self._idle_s += now - self._idle_since
        self._idle_since = now
        if is_idle:
            self._idle.add(why)
        else:
            self._idle.discard(why)

    @property
    def is_over(self) -> bool:
        """Whether the limit is exceeded."""
        if self.limit_s is None:
            return False
        now = time.monotonic()
        idle_s = self._idle_s + (now - self._idle_since if self._idle else 0.0)
        return now - self._began - idle_s > self.limit_s

    def allow(self, grace_s: float) -> None:
        """Set a deadline after this time, or keep an earlier one."""
        deadline = time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def allow_again(self, grace_s: float) -> None:
        """Set a deadline after this time, in place of an earlier one."""
        self._deadline = time.monotonic() + grace_s

    def drop_deadline(self) -> None:
        """Forget the deadline."""
        self._deadline = None

    @property
    def is_past_deadline(self) -> bool:
        """Whether the job should have stopped."""
        return self._deadline is not None and time.monotonic() > self._deadline
