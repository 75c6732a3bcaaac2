"""The zygote's memory in huge pages, so that a fork has fewer page-table entries to copy.

A fork copies one entry for each page of anonymous memory (heap, Python objects; mapped weights cost
nothing): 120,000 of 4 KB with the libraries and one tokenizer, most of the time that a fork takes.
A horse that writes to a huge page still gets a copy of 4 KB: Linux splits the horse's mapping.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ...jobs.compute import hugepages

_LEAST_FILLED = 0.9  # minimum resident part of a mapping: the rest would become resident


def move() -> Iterator[None]:
    """Move this process's anonymous memory into huge pages, a few at each step.

    Memory that is shared with horses is copied, and is used twice until they end.
    """
    return hugepages.move(_areas(Path("/proc/self/smaps")))


def _areas(smaps: Path) -> Iterator[tuple[int, int]]:
    """Yield (address, bytes) of the whole huge pages in well-filled anonymous mappings."""
    try:
        lines = smaps.read_text().splitlines()
    except OSError:  # a kernel built without it: the memory stays where it is
        return
    begin = end = 0
    for line in lines:
        name, *values = line.split()
        if not name.endswith(":"):  # a mapping: ADDRESSES PERMISSIONS OFFSET DEVICE INODE [NAME]
            begin = end = 0
            if values[0] == "rw-p" and values[4:] in ([], ["[heap]"]):
                begin, end = (int(address, 16) for address in name.split("-"))
        elif name == "Rss:" and int(values[0]) * 1024 >= _LEAST_FILLED * (end - begin):
            first = -(-begin // hugepages.HUGE_PAGE) * hugepages.HUGE_PAGE
            last = end // hugepages.HUGE_PAGE * hugepages.HUGE_PAGE
            if first < last:
                yield first, last - first
