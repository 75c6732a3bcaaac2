"""The names of the processes of a job with several: `warmd-rank-1`, as `ps` and `top` show them.

The worker finds the ranks of a horse by these names, to say which of them hangs. Linux only.
"""

from __future__ import annotations

import ctypes
import re
import sys

import psutil

_PR_SET_NAME = 15
_NAME = re.compile(r"warmd-rank-(\d+)")  # the kernel keeps 15 characters


def name_this_process(rank: int) -> None:
    """Give this process the name of a rank."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_NAME, b"warmd-rank-%d" % rank)


def ranks_of(horse: int) -> dict[int, int]:
    """Return the process ids of the ranks that the horse `horse` has forked, by their number."""
    found = {}
    try:
        children = psutil.Process(horse).children()
    except psutil.NoSuchProcess:
        return {}
    for child in children:
        try:
            match = _NAME.fullmatch(child.name())
        except psutil.NoSuchProcess:
            continue
        if match is not None:
            found[int(match[1])] = child.pid
    return dict(sorted(found.items()))
