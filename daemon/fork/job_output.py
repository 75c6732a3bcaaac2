"""stdout and stderr of a job's process: on a full disk lines are dropped, and the job continues."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Any

from ...jobs.files.shortage import lacks_space


def survive_full_disks() -> None:
    """Replace stdout and stderr by streams that drop what a full disk has no room for."""
    sys.stdout = _stream(1, line_buffering=False)
    sys.stderr = _stream(2, line_buffering=True)


def redirect_output(path: Path) -> None:
    """Append stdout and stderr of this process to a file; stdin is empty. Raises OSError."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _stream(descriptor: int, *, line_buffering: bool) -> io.TextIOWrapper:
    raw: Any = _Output(descriptor, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=line_buffering,
    )


class _Output(io.FileIO):
    """A file that reports how much it has dropped as soon as it can be written again."""

    _num_dropped = 0  # bytes

    def write(self, data: Any, /) -> int:
        try:
            if self._num_dropped:
                super().write(b"[warmd: %d bytes lost: disk full]\n" % self._num_dropped)
                self._num_dropped = 0
            return super().write(data) or 0
        except OSError as error:
            if not lacks_space(error):
                raise
            self._num_dropped += memoryview(data).nbytes
            return memoryview(data).nbytes
