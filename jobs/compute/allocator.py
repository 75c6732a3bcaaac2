"""Keeps freed memory in the process, for training steps that allocate the same sizes again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Set glibc's malloc to keep freed memory instead of returning it to the kernel.

    Otherwise large tensors are unmapped at every step, and the kernel faults in and zeroes each of
    their pages again at the next.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # not in musl
        libc.mallopt(_M_MMAP_THRESHOLD, _NEVER)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
