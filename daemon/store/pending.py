"""The run directories of a home that are not completely in the store: a file each in HOME/store.

A worker writes it when an execution begins, and marks it when the execution ends; the uploader
removes it when everything is uploaded. Only then does the worker report the end of a training. The
files survive kills and power failures: the jobs that they name are uploaded after the next start.
"""

from __future__ import annotations

import fcntl
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import orjson

from ...jobs.files import records
from ...jobs.files.atomic import write_atomic
from ...jobs.ids import is_job_id
from ..host.home import Home

_PROBLEM = "problem"
_LOCKS = 16  # lock files shared by all jobs: one per job would stay forever


@dataclass(frozen=True)
class Pending:
    """An execution whose run directory is to be uploaded."""

    execution: int
    events_from: int  # length of the event log in the store when it began
    has_ended: bool = False  # nothing more is written: remove the file after the next upload


class PendingUploads:
    """The files in HOME/store."""

    def __init__(self, home: Home) -> None:
        self.folder = home.store

    def jobs(self) -> list[str]:
        """Return the ids of all jobs with such a file, in the order of their creation."""
        with suppress(FileNotFoundError):
            return sorted(filter(is_job_id, os.listdir(self.folder)))
        return []

    def read(self, job_id: str) -> Pending | None:
        """Return the content of a job's file; None: there is none, or it cannot be read."""
        return records.read(self.folder / job_id, Pending)

    def write(self, job_id: str, pending: Pending) -> None:
        """Note an execution. Raises OSError."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        write_atomic(self.folder / job_id, orjson.dumps(pending))

    def is_uploaded(self, job_id: str) -> bool:
        """Whether all of a job is in the store."""
        return not (self.folder / job_id).exists()

    def remove(self, job_id: str) -> None:
        """Note that all of a job is in the store."""
        (self.folder / job_id).unlink(missing_ok=True)
        self.note_problem(job_id, None)

    @contextmanager
    def fetching(self, job_id: str) -> Iterator[None]:
        """Keep other processes of this home from writing a job's run directory from the store."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        path = self.folder / f".lock-{zlib.crc32(job_id.encode()) % _LOCKS:02d}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def problem(self, job_id: str) -> str | None:
        """Return why a job cannot be uploaded now; None: it can."""
        with suppress(FileNotFoundError):
            return self._problem_of(job_id).read_text()
        return None

    def note_problem(self, job_id: str, problem: str | None) -> None:
        """Note why a job cannot be uploaded, for the worker that runs it. Raises OSError."""
        if problem is None:
            self._problem_of(job_id).unlink(missing_ok=True)
        else:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            write_atomic(self._problem_of(job_id), problem.encode())

    def clear_problems(self) -> None:
        """Remove what an earlier uploader noted."""
        for path in self.folder.glob(f"{_PROBLEM}*"):
            path.unlink(missing_ok=True)

    def _problem_of(self, job_id: str) -> Path:
        return self.folder / f"{_PROBLEM}-{job_id}"
