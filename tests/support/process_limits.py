"""A limit on the number of processes and threads: a real control group of the kernel."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

from needs import needs


class ProcessLimit:
    """A control group whose processes and threads can be limited, together."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, pid: int) -> None:
        """Move a process into the group; its later children are in it, too."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def set(self, *, more: int | None) -> None:
        """Allow this many more threads than there are now; None: any number."""
        current = int((self._folder / "pids.current").read_text())
        limit = "max" if more is None else str(current + more)
        (self._folder / "pids.max").write_text(limit)

    def forbid(self, *, beyond: int = 0) -> None:
        """Allow at most so many in all; those that there are stay."""
        (self._folder / "pids.max").write_text(str(beyond))


@contextlib.contextmanager
def process_limit(name: str) -> Iterator[ProcessLimit]:
    """Make a group; all its processes must have ended at the end of the block."""
    root = next(
        (
            path
            for path in (Path("/sys/fs/cgroup/pids"), Path("/sys/fs/cgroup"))
            if (path / "cgroup.procs").exists()
        ),
        None,
    )
    folder = Path() if root is None else root / name
    made = False
    if root is not None:
        with contextlib.suppress(OSError):
            folder.mkdir()
            made = (folder / "pids.max").exists()
    needs(made, "the right to make a control group with a limit of processes")
    limit = ProcessLimit(folder)
    try:
        yield limit
    finally:
        limit.set(more=None)
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
