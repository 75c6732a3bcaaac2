"""Source pages: the resident pages of weights whose layers have packed copies of them.

Packed weights are copies, so the mapped pages of the model's files that they were made of would
only take memory. They are released: unmapped from this process by MADV_DONTNEED, and read from the
file again if a weight is. That is lossless for unmodified pages of a file and for no others, which
/proc/self/pagemap tells apart page by page. Released are such pages only: weights in anonymous
memory stay, be they widened when loaded, or written to after they were mapped.

Imports neither torch nor numpy: the zygote loads this module before it reports their import.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Bits of an entry of /proc/self/pagemap (Documentation/admin-guide/mm/pagemap.rst). A private copy
# of a file's page is anonymous: it lacks _OF_FILE, or has _SWAPPED instead of _PRESENT.
_PRESENT, _SWAPPED, _OF_FILE = 1 << 63, 1 << 62, 1 << 61
_ENTRY_BYTES = 8

# Held from the look at pages until they are released, and while a mapping of weights is replaced
# (daemon/fork/held_files.py): anonymous memory in the place of a file's pages would be lost.
MAPPINGS = threading.Lock()


def release(weights: Iterable[torch.Tensor]) -> int:
    """Release the resident, unmodified file pages of weights; return their bytes.

    Values and addresses do not change, and other processes keep their pages. No other thread may
    write to the weights meanwhile. Pages that a weight shares with its neighbors stay. Does nothing
    on a system other than Linux, or without /proc/self/pagemap.
    """
    if sys.platform != "linux":
        return 0
    with MAPPINGS:
        return sum(_release(*area) for weight in weights for area in _whole_pages(weight))


def _whole_pages(weight: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Yield the numbers of the first page that lies in a weight and of the page after the last."""
    if weight.device.type != "cpu" or not weight.is_contiguous():
        return
    begin, end = weight.data_ptr(), weight.data_ptr() + weight.nbytes
    first, last = -(-begin // mmap.PAGESIZE), end // mmap.PAGESIZE
    if first < last:
        yield first, last


def _release(first: int, last: int) -> int:
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    released = 0
    for begin, end in _file_pages(first, last):
        num_bytes = (end - begin) * mmap.PAGESIZE
        if madvise(begin * mmap.PAGESIZE, num_bytes, mmap.MADV_DONTNEED) == 0:  # else locked
            released += num_bytes
    return released


def _file_pages(first: int, last: int) -> list[tuple[int, int]]:
    """Return the runs (first, end) of resident, unmodified file pages among pages of this process.

    Empty where the kernel does not show them.
    """
    import numpy as np

    try:
        with open("/proc/self/pagemap", "rb") as pagemap:
            pagemap.seek(first * _ENTRY_BYTES)
            entries = np.frombuffer(pagemap.read((last - first) * _ENTRY_BYTES), np.uint64)
    except OSError:
        return []
    is_file_page = entries & (_PRESENT | _SWAPPED | _OF_FILE) == _PRESENT | _OF_FILE
    edges = np.flatnonzero(np.diff(is_file_page.astype(np.int8), prepend=0, append=0)) + first
    return [(int(begin), int(end)) for begin, end in edges.reshape(-1, 2)]
