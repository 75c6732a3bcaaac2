"""Memory of an idle resident horse.

glibc keeps what jobs have freed (jobs/compute/allocator.py), and a library may leak. A horse that
holds much more than when it was first idle gives freed memory back; if that does not help it
retires, and the next job gets a new horse. Caches and packed weights of the engines do not count.
Imports torch in a function only, as it must be imported after its environment is set.
"""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path

from ...configs.units import format_size
from ...jobs.compute.allocator import release_freed_memory

log = logging.getLogger(__name__)

GROWN_BYTES = 2_000_000_000  # more than other caches of libraries ever take


class IdleMemory:
    """Compares the memory of this process, between two jobs, with what it first was."""

    def __init__(self) -> None:
        self._first: int | None = None  # when it was first idle
        self._lock = threading.Lock()

    def has_grown(self) -> bool:
        """Give freed memory back if there is much; return whether much is still left over."""
        with self._lock:
            if self._is_small():
                return False
            gc.collect()
            release_freed_memory()
            if self._first is None:
                self._first = _anonymous_bytes() - _kept_bytes()[0]
            if self._is_small():
                return False
            left = _anonymous_bytes() - self._first
            log.warning("horse: jobs have left %s of memory: it retires", format_size(left))
            return True

    def _is_small(self) -> bool:
        if self._first is None:
            return False
        grown = _anonymous_bytes() - self._first
        if grown <= GROWN_BYTES:
            return True
        caches, weights = _kept_bytes()
        return grown - caches <= GROWN_BYTES + weights


def _kept_bytes() -> tuple[int, int]:
    """The memory of caches, and the most that packed weights may take."""
    from ...jobs.engine.engines import kept_bytes

    return kept_bytes()


def _anonymous_bytes() -> int:
    """Resident memory of this process that is no file's; 0 where that is not known."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    found = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(next(found, "0")) * 1024
