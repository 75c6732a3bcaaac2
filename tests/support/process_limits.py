"""Limits on processes and threads, and on memory: real control groups of the kernel."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from needs import needs

_MOMENT_S, _LOOKS = 0.3, 30


class ProcessLimit:
    """A control group whose processes and threads can be limited, together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, pid: int) -> None:
        """Move a process into the group; its later children are in it, too."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def set(self, *, more: int | None) -> None:
        """Allow this many more threads than there are now; None: any number.

        Short-lived threads are not counted: when one ends, another thread could be started.
        """
        limit = "max" if more is None else str(self._lasting() + more)
        (self._folder / "pids.max").write_text(limit)

    def _lasting(self) -> int:
        """Return the smallest number of threads during the next 0.3 s."""
        found = []
        for _ in range(_LOOKS):
            found.append(int((self._folder / "pids.current").read_text()))
            time.sleep(_MOMENT_S / _LOOKS)
        return min(found)

    def forbid(self, *, beyond: int = 0) -> None:
        """Allow at most so many in all; those that there are stay."""
        (self._folder / "pids.max").write_text(str(beyond))


@contextlib.contextmanager
def process_limit(name: str) -> Iterator[ProcessLimit]:
    """Make a group; all its processes must have ended at the end of the block."""
    with _group("pids", ("pids.max",), name) as (folder, _):
        limit = ProcessLimit(folder)
        try:
            yield limit
        finally:
            limit.set(more=None)


@contextlib.contextmanager
def memory_limit(name: str, limit_bytes: int) -> Iterator[Callable[[int], None]]:
    """Make a group with so much memory, beyond which the kernel kills; yields what adds a process.

    Only what is allocated in the group counts. All its processes must have ended at the end.
    """
    files = ("memory.max", "memory.limit_in_bytes")  # of cgroup v2, v1
    with _group("memory", files, name) as (folder, file):
        file.write_text(str(limit_bytes))

        def add(pid: int) -> None:
            (folder / "cgroup.procs").write_text(str(pid))

        yield add


@contextlib.contextmanager
def _group(controller: str, files: Sequence[str], name: str) -> Iterator[tuple[Path, Path]]:
    """Make a control group that has one of these files; yield its folder and the file."""
    places = (Path("/sys/fs/cgroup") / controller, Path("/sys/fs/cgroup"))
    root = next((path for path in places if (path / "cgroup.procs").exists()), None)
    # A killed test may have left a group of its name.
    folder = Path() if root is None else root / f"{name}-{uuid.uuid4().hex[:8]}"
    found: list[Path] = []
    if root is not None:
        with contextlib.suppress(OSError):
            folder.mkdir()
            found = [folder / file for file in files if (folder / file).exists()]
    needs(bool(found), f"the right to make a control group ({controller})")
    try:
        yield folder, found[0]
    finally:
        deadline = time.monotonic() + 10
        while True:
            try:
                folder.rmdir()
            except OSError:  # a process is ending
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                break
