"""What the supervisors of one daemon, which follow each other, and their guardian know together."""

from __future__ import annotations

import mmap
import secrets

_END, _WARM = 0, 1


class Life:
    """A daemon's life, from its start to its stop. Made by the guardian, before it forks."""

    def __init__(self) -> None:
        self.name = secrets.token_hex(8)  # tells it from the daemon's other lives
        self._flags = mmap.mmap(-1, 2)  # shared by all who are forked, and never taken back

    def want_end(self) -> None:
        """Say that the daemon is to end: its supervisor need not be replaced."""
        self._flags[_END] = 1

    def note_warm(self) -> None:
        """Say that all parts of it were ready: what fails now failed by accident."""
        self._flags[_WARM] = 1

    @property
    def end_wanted(self) -> bool:
        return self._flags[_END] != 0

    @property
    def was_warm(self) -> bool:
        return self._flags[_WARM] != 0
