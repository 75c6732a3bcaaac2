"""Processes that end with the process that started them.

A daemon that is killed must leave nothing behind that still writes. Linux sends a signal when
the parent dies; elsewhere the children notice that a pipe from the supervisor has closed.

Run as a file (`python leash.py SIGNAL PARENT COMMAND ...`) it puts the leash on a program that
knows nothing of it; the kernel keeps the setting across exec.
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
    if os.getppid() != parent:  # it died before the leash was on
        os.kill(os.getpid(), sig)


def leashed(command: list[str], sig: int = signal.SIGTERM) -> list[str]:
    """Return the command line that runs `command` on a leash held by this process."""
    return [sys.executable, "-I", "-S", __file__, str(int(sig)), str(os.getpid()), *command]


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]), int(sys.argv[1]))
    os.execv(sys.argv[3], sys.argv[3:])
