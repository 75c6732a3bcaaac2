"""The memory of this machine, or of the container that this process is in, where it has a limit."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")  # version 2: of the container


def memory_bytes() -> int:
    """Return the memory that this machine or container may use."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _limit_bytes()
    return machine if limit is None else min(machine, limit)


def available_bytes() -> int:
    """Return the memory that can still be had without swapping, in this machine and container."""
    import psutil  # here: the command line asks for the whole only

    machine = int(psutil.virtual_memory().available)
    limit = _limit_bytes()
    if limit is None:
        return machine
    lines = (_CGROUP / "memory.stat").read_text().splitlines()
    parts = {name: int(num_bytes) for name, num_bytes in map(str.split, lines)}
    # Files that were read, as a model's weights, go when others need their place.
    kept = int((_CGROUP / "memory.current").read_text())
    kept -= parts["active_file"] + parts["inactive_file"]
    return min(machine, max(limit - kept, 0))


def _limit_bytes() -> int | None:
    """Return the limit of the container, None where it has none or this is the machine itself."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
    except OSError:
        return None
    return int(limit) if limit.isdigit() else None
