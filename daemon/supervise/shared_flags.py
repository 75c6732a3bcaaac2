"""Flags in memory shared by the guardian and the supervisors that it starts one after another."""

from __future__ import annotations

import mmap
import secrets

_STOP, _WARM = 0, 1


class SharedFlags:
    """The state of one daemon run, from `warmd start` to its end.

    Created before the guardian forks. Flags are set once and never cleared.
    """

    def __init__(self) -> None:
        self.run_id = secrets.token_hex(8)  # differs from all other runs of the daemon
        self._flags = mmap.mmap(-1, 2)

    def set_stop_requested(self) -> None:
        """Record that the daemon should end: a supervisor that dies is not restarted."""
        self._flags[_STOP] = 1

    def set_warm(self) -> None:
        """Record that all processes were ready once: a later failure may be temporary."""
        self._flags[_WARM] = 1

    @property
    def is_stop_requested(self) -> bool:
        return self._flags[_STOP] != 0

    @property
    def was_warm(self) -> bool:
        return self._flags[_WARM] != 0
