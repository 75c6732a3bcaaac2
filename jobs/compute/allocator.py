"""Memory that is freed and soon wanted again."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1


def keep_freed_memory() -> None:
    """Have glibc keep what this process frees, for its next use of as much.

    Otherwise large tensors go back to the kernel at every step, and each of their pages is faulted
    in and zeroed again at the next.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # musl has none
        libc.mallopt(_M_MMAP_THRESHOLD, _NEVER)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)
