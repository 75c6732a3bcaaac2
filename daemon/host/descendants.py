"""The processes below this one: kept below it when their parents die, and ended with it.

A job's own code may start processes, and these may leave their process group and their session.
They cannot leave their line of descent where a process above them adopts orphans
(PR_SET_CHILD_SUBREAPER of Linux). The horse does, the zygote for a horse that was killed, and the
guardian for a zygote that was. A cgroup would end them all by one write, but users and containers
seldom have the right to make one.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Container
from pathlib import Path

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.002


def adopt_orphans() -> None:
    """Become the parent of every process below this one whose own parent dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_children(*, spare: Container[int] = ()) -> list[int]:
    """Send SIGKILL to the children of this process but for `spare`; return their ids."""
    doomed = [pid for pid in _children() if pid not in spare]
    for pid in doomed:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # gone; or setuid
            os.kill(pid, signal.SIGKILL)
    return doomed


def end_descendants(*, within_s: float = 5.0) -> int:
    """Kill and reap every process below this one, which adopts orphans; return how many.

    The children of one that ends become children of this process, so that it can reap them all.
    """
    ended: set[int] = set()
    deadline = time.monotonic() + within_s
    while _reap() and time.monotonic() < deadline:
        ended.update(kill_children())
        time.sleep(_POLL_S)  # no call waits for a child only until a deadline
    return len(ended)


def _reap() -> bool:
    """Reap the children that have ended; return whether any is left."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    try:
        # Each thread has its own.
        texts = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    except OSError:  # a thread has just ended
        texts = []
    if texts:
        return [int(pid) for text in texts for pid in text.split()]
    return [child.pid for child in psutil.Process().children()]
