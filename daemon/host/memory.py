"""How much memory a process uses, and sizes for people."""

from __future__ import annotations

import psutil


def resident_bytes(pid: int) -> int | None:
    """Resident memory of a process (mapped weights that were read count), None when it is gone."""
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return None


def shown(size_bytes: float) -> str:
    """A size for people: '1.98 GB'."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while size_bytes >= 1000 and len(units) > 1:
        size_bytes /= 1000
        units.pop(0)
    return f"{size_bytes:.3g} {units[0]}"
