"""Writes the stacks of a process's threads to its stderr when it receives SIGNAL."""

from __future__ import annotations

import faulthandler
import signal

SIGNAL = signal.SIGUSR2


def write_stacks_on_signal() -> None:
    """Write the stacks of all threads of this process whenever it receives SIGNAL."""
    faulthandler.register(SIGNAL, file=2, all_threads=True)
