"""Moves weights into huge pages (2 MB): fewer TLB misses when all weights are read for every token.

Linux collapses pages on request (MADV_COLLAPSE, from 6.1 on). On other systems, or if no huge page
becomes free, nothing changes.
"""

from __future__ import annotations

import ctypes
import errno
import sys
import time
from collections.abc import Callable, Iterable, Iterator

HUGE_PAGE = 2**21  # bytes, on x86-64 and on ARM with 4 KB pages
_PER_STEP = 4  # pages: copying them took 5 to 20 ms
_MADV_COLLAPSE = 25
# No huge page is free, or this one is in use right now. Where files have filled the memory, more
# than half of the pages were refused so, and the kernel, which then makes room in the background,
# took all of them in the course of eight passes, a second apart.
_LATER = (errno.ENOMEM, errno.EAGAIN, errno.EBUSY)
_PASSES = 10
_VAIN_PASSES = 3  # in succession, after which no huge page is expected any more
_WAITS, _WAIT_S = 50, 0.02  # steps between two passes, each as long as one that copies


def move_all(areas: Iterable[tuple[int, int]]) -> None:
    """Move areas into huge pages at once, those that are free: 0.4 to 1.3 s for a gigabyte."""
    if (collapse := _collapse()) is not None:
        for page in _pages(areas):
            collapse(page)


def move(areas: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Move areas, (address, bytes) each, into huge pages; yield after each step of at most 20 ms.

    What finds no free huge page is tried again a second later, a few times. Virtual addresses do
    not change. Other data in the first and last page is also moved.
    """
    if (collapse := _collapse()) is None:
        return
    left, vain = _pages(areas), 0
    for _ in range(_PASSES):
        refused = []
        for done, page in enumerate(left, start=1):
            if collapse(page) in _LATER:
                refused.append(page)
            if done % _PER_STEP == 0:
                yield
        vain = vain + 1 if len(refused) == len(left) else 0
        if not refused or vain == _VAIN_PASSES:
            return
        left = refused
        for _ in range(_WAITS):
            time.sleep(_WAIT_S)
            yield


def _pages(areas: Iterable[tuple[int, int]]) -> list[int]:
    """Return the numbers of the huge pages that areas touch."""
    return sorted(
        {
            page
            for address, num_bytes in areas
            for page in range(address // HUGE_PAGE, -(-(address + num_bytes) // HUGE_PAGE))
        }
    )


def _collapse() -> Callable[[int], int] | None:
    """Return what moves a page, by number, and returns 0 or an errno; None: not on this system."""
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def collapse(page: int) -> int:
        failed = madvise(page * HUGE_PAGE, HUGE_PAGE, _MADV_COLLAPSE) != 0
        return ctypes.get_errno() if failed else 0

    return collapse
