"""The timeout of an execution, and the deadline by which a job that was asked to stop must end."""

from __future__ import annotations

import time


class Timeout:
    """Measures the running time of one execution from now on, without pauses and waits."""

    def __init__(self, seconds: float | None) -> None:
        """`seconds`: the longest running time; None: unlimited."""
        self.seconds = seconds
        self._began = time.monotonic()
        self._idle: set[str] = set()  # why its time does not count: "paused", "waiting"
        self._idle_since = 0.0
        self._idle_s = 0.0
        self._deadline: float | None = None

    def set_idle(self, why: str, is_idle: bool) -> None:
        """Stop counting the time for the reason `why`, or count it again."""
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
        """Whether the running time exceeds the timeout."""
        if self.seconds is None:
            return False
        now = time.monotonic()
        idle_s = self._idle_s + (now - self._idle_since if self._idle else 0.0)
        return now - self._began - idle_s > self.seconds

    def set_deadline(self, grace_s: float) -> None:
        """Set the deadline `grace_s` seconds from now, unless an earlier one is set."""
        deadline = time.monotonic() + grace_s
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)

    def move_deadline(self, grace_s: float) -> None:
        """Set the deadline `grace_s` seconds from now, also where an earlier one is set."""
        self._deadline = time.monotonic() + grace_s

    def clear_deadline(self) -> None:
        """Remove the deadline."""
        self._deadline = None

    @property
    def is_past_deadline(self) -> bool:
        """Whether the deadline has passed."""
        return self._deadline is not None and time.monotonic() > self._deadline
