"""The memory of this machine, or the limit of a container, systemd unit or Slurm job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_CGROUPS = Path("/sys/fs/cgroup")  # in a container, its own cgroup is the root

_NO_LIMIT = 2**62  # version 1 has a huge number instead of "max"


class _Version(NamedTuple):
    """The files of a version of cgroups, and the counters of the page cache in memory.stat."""

    prefix: str  # of the line in /proc/PID/cgroup, without the number
    folder: str  # below the mounted cgroups
    limit: str
    used: str
    cache: tuple[str, str]


_VERSIONS = (
    _Version("::", "", "memory.max", "memory.current", ("active_file", "inactive_file")),
    _Version(
        ":memory:",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
)


def memory_bytes() -> int:
    """Return the memory that this process and others in its cgroup may use."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for _, limit, _ in _limited())])


def swap_bytes() -> int:
    """Return the size of the swap space of this machine."""
    import psutil  # imported here: the command line seldom needs it

    return int(psutil.swap_memory().total)


def available_bytes() -> int:
    """Return the memory that this machine and cgroup can still allocate without swapping."""
    import psutil  # imported here: the command line needs only the total

    available = [int(psutil.virtual_memory().available)]
    for folder, limit, version in _limited():
        lines = (folder / "memory.stat").read_text().splitlines()
        parts = {name: int(num_bytes) for name, num_bytes in map(str.split, lines)}
        # The page cache (files that were read, such as weights) is freed when memory is needed.
        kept = int((folder / version.used).read_text()) - sum(map(parts.__getitem__, version.cache))
        available.append(max(limit - kept, 0))
    return min(available)


def _limited(
    cgroups: Path | None = None, own: Path = Path("/proc/self/cgroup")
) -> Iterator[tuple[Path, int, _Version]]:
    """The cgroups with a limit that hold this process, with their limits: its own, and those above.

    A container sees its own as the root; systemd and Slurm set limits on inner ones. Where version
    1 is mounted, it may have the memory controller instead of version 2.
    """
    try:
        lines = own.read_text().splitlines()
    except OSError:  # not Linux
        return
    for version in _VERSIONS:
        root = (cgroups or _CGROUPS) / version.folder
        named = (line.partition(version.prefix) for line in lines)
        inner = next((path for number, sep, path in named if sep and number.isdigit()), None)
        if inner is None:
            continue
        folder = root / inner.lstrip("/")
        if ".." in folder.parts or not folder.is_dir():  # of a process outside the root
            folder = root
        while folder.is_relative_to(root):
            try:
                limit = int((folder / version.limit).read_text())
            except (OSError, ValueError):  # the root of the machine, or "max"
                limit = _NO_LIMIT
            if limit < _NO_LIMIT:
                yield folder, limit, version
            folder = folder.parent
