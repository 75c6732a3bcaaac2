"""The stacks of a process' threads, written to its stderr when it is sent SIGNAL."""

from __future__ import annotations

import faulthandler
import signal

SIGNAL = signal.SIGUSR2


def write_stacks_on_signal() -> None:
    """Write the stacks of all threads of this process whenever it is sent SIGNAL."""
    faulthandler.register(SIGNAL, file=2, all_threads=True)
