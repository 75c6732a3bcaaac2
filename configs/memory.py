"""The memory of this machine, or the limit of a container, systemd unit or Slurm job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")  # version 2; in a container, its own is the root


def memory_bytes() -> int:
    """Return the memory that this process and others in its cgroup may use."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for _, limit in _limited())])


def swap_bytes() -> int:
    """Return the size of the swap space of this machine."""
    import psutil  # imported here: the command line seldom needs it

    return int(psutil.swap_memory().total)


def available_bytes() -> int:
    """Return the memory that this machine and cgroup can still allocate without swapping."""
    import psutil  # imported here: the command line needs only the total

    available = [int(psutil.virtual_memory().available)]
    for folder, limit in _limited():
        lines = (folder / "memory.stat").read_text().splitlines()
        parts = {name: int(num_bytes) for name, num_bytes in map(str.split, lines)}
        # The page cache (files that were read, such as weights) is freed when memory is needed.
        kept = int((folder / "memory.current").read_text())
        kept -= parts["active_file"] + parts["inactive_file"]
        available.append(max(limit - kept, 0))
    return min(available)


def _limited(
    cgroups: Path | None = None, own: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[Path, int]]:
    """The cgroups with a limit that hold this process, with their limits: its own, and those above.

    A container sees its own as the root; systemd and Slurm set limits on inner ones.
    """
    cgroups = cgroups or _CGROUPS
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    inner = next((line.partition("::/")[2] for line in lines if line.startswith("0::/")), "")
    folder = cgroups / inner
    if ".." in folder.parts:  # of a process outside the namespace's root
        folder = cgroups
    while folder.is_relative_to(cgroups):
        try:
            limit = (folder / "memory.max").read_text().strip()
        except OSError:  # the root of the machine, or version 1
            limit = ""
        if limit.isdigit():
            yield folder, int(limit)
        folder = folder.parent
