"""Freed memory: kept in the process for the next step of the same sizes, or given back."""

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


def release_freed_memory() -> None:
    """Return memory that was freed to the kernel, which takes a moment for each gigabyte."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
