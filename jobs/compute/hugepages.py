"""Memory in pages of 2 MB, for weights that are read from end to end for every token.

In pages of 4 KB a processor has 512 times as many places to look up. Linux moves memory into huge
pages when asked to, from 6.1 on; elsewhere, and where no huge page is free, everything stays as it
is.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator

HUGE_PAGE = 2**21  # bytes, on x86-64, and on ARM with pages of 4 KB
_PER_STEP = 4  # pages: moving copies them, which took 5 to 20 ms
_MOST_FAILURES = 8  # one after the other: it fails now and then, as at the heap's end
_MADV_COLLAPSE = 25


def move(areas: Iterable[tuple[int, int]]) -> Iterator[None]:
    """Move memory, (address, bytes) each, into huge pages, a few at each step.

    Addresses stay as they are. What else lies in a first or last page is moved with it.
    """
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    pages = sorted(
        {
            page
            for address, num_bytes in areas
            for page in range(address // HUGE_PAGE, -(-(address + num_bytes) // HUGE_PAGE))
        }
    )
    failures = 0
    for done, page in enumerate(pages, start=1):
        has_moved = madvise(page * HUGE_PAGE, HUGE_PAGE, _MADV_COLLAPSE) == 0
        failures = 0 if has_moved else failures + 1
        if failures > _MOST_FAILURES:
            return
        if done % _PER_STEP == 0:
            yield
