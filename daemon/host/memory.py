"""How much memory a process uses."""

from __future__ import annotations

import psutil


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process (mapped weights that were read count), None when it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None
