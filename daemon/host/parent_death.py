"""Processes that end with the process that started them.

A daemon that is killed must leave no process behind that still writes. On Linux the kernel sends a
signal when the parent dies (prctl, PR_SET_PDEATHSIG); elsewhere the children notice that a pipe
from the supervisor has closed.

Run as a script (`python parent_death.py SIGNAL PARENT COMMAND ...`) it sets this for any program:
the kernel keeps the setting across exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int, sig: int = signal.SIGKILL) -> None:
    """Ask the kernel to send `sig` when `parent`, which started this process, dies."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, sig)
    if os.getppid() != parent:  # it died before the setting was made
        os.kill(os.getpid(), sig)


def tied_to_parent(command: list[str], sig: int = signal.SIGTERM) -> list[str]:
    """Return a command line that runs `command` and ends it with this process."""
    return [sys.executable, "-I", "-S", __file__, str(int(sig)), str(os.getpid()), *command]


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]), int(sys.argv[1]))
    os.execv(sys.argv[3], sys.argv[3:])
