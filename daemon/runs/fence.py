"""The fence of a run directory: the number of the latest execution that may write there.

A worker whose machine was suspended or cut off may come back after another machine has taken its
job (a late writer). Locks do not stop it on every network file system, so the number of the
execution is a fencing token (Kleppmann, "How to do distributed locking", 2016): a later execution
raises the fence, and an earlier one then commits neither a checkpoint nor a result.

The number is in the file `execution`, replaced as a whole: opening a file shows its latest content
also on NFS (close-to-open consistency). First executions have nothing to fence off and write none.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ...jobs.errors import Conflict
from ...jobs.files.atomic import write_atomic

NAME = "execution"


class Superseded(Conflict):
    """A later execution of the job writes here now."""


@dataclass(frozen=True)
class Fence:
    """The right of one execution to write a run directory."""

    folder: Path
    execution: int  # from 1

    def claim(self) -> None:
        """Fence off all earlier executions. Raises Superseded if a later one has done so.

        Called with the lock of the run directory held, where the file system has locks.
        """
        self.check()
        if self.execution > 1:
            write_atomic(self.folder / NAME, b"%d\n" % self.execution)
            self.check()  # a later one may have been written in between

    def check(self) -> None:
        """Raise Superseded if a later execution has begun."""
        found = latest(self.folder)
        if found > self.execution:
            raise Superseded(
                f"job: execution {self.execution} of {self.folder.name} was superseded by "
                f"execution {found}: it writes nothing more"
            )


def latest(folder: Path) -> int:
    """Return the number in the fence of a run directory; 0 if there was at most one execution."""
    try:
        descriptor = os.open(folder / NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return 0
    try:
        text = os.read(descriptor, 32).strip()
    finally:
        os.close(descriptor)
    return int(text) if text.isdigit() else 0
