"""Updates run directories before commands show them; if that fails, the local state is shown.

Commands that change a job use RemoteRuns instead, and fail: they must not decide on outdated files.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from ...jobs.context import checkpoint_name
from ...jobs.errors import CheckpointDamaged, Conflict, NotFound
from ..runs.checkpoints import read_manifest
from .bucket import StoreUnavailable
from .remote import RemoteRuns

OnOutdated = Callable[[str], None]  # receives one line: why the shown data may be out of date

_RETRY_S = 20.0  # an unreachable store is not requested again for this time: each request may hang


class ReadableRuns:
    """The run store of one home, for reading. Called from several threads."""

    def __init__(self, remote: RemoteRuns, runs: Path, on_outdated: OnOutdated) -> None:
        self._remote = remote
        self._runs = runs
        self._on_outdated = on_outdated
        self._lock = threading.Lock()
        self._reported: str | None = None  # the latest problem, until a request succeeds
        self._away: tuple[StoreUnavailable, float] | None = None  # the latest, and when it failed

    def refresh(self, job_id: str) -> None:
        """Update what commands show of a job.

        Raises StoreUnavailable, Conflict, NotFound and OSError if that fails and nothing of the job
        is on this machine.
        """
        is_here = (self._runs / job_id / "spec.json").is_file()
        self._try(lambda: self._remote.refresh(job_id), is_enough=is_here)

    def refresh_summaries(self, job_ids: Collection[str]) -> None:
        """Update the files of these jobs that lists show."""
        self._try(lambda: self._remote.refresh_summaries(job_ids))

    def refresh_all(self) -> None:
        """Update the files of all jobs in the store that lists show."""
        self._try(lambda: self._remote.refresh_summaries(self._remote.ids()))

    def fetch_checkpoint(self, job_id: str, step: int) -> None:
        """Complete a checkpoint on this machine. Raises as `refresh`, and CheckpointDamaged."""
        is_here = _has_all_files(self._runs / job_id / "checkpoints" / checkpoint_name(step))
        self._try(lambda: self._remote.fetch_checkpoint(job_id, step), is_enough=is_here)

    def fetch_model(self, job_id: str) -> None:
        """Make the final model of a job complete on this machine, if it has one.

        Raises as `refresh`.
        """
        is_here = (self._runs / job_id / "model").is_dir()  # it appears as a whole
        self._try(lambda: self._remote.fetch_model(job_id), is_enough=is_here)

    def _try(self, request: Callable[[], None], *, is_enough: bool = True) -> None:
        """`is_enough`: the files that are here can be shown without an update."""
        away = self._away
        if away is not None and time.monotonic() - away[1] < _RETRY_S:
            if not is_enough:
                raise away[0]
            return
        try:
            request()
        except StoreUnavailable as error:
            self._away = error, time.monotonic()
            self._report(str(error))
            if not is_enough:
                raise
        except (Conflict, NotFound, OSError) as error:  # damaged in the store; the local disk
            self._report(str(error))
            if not is_enough:
                raise
        else:
            self._away = self._reported = None

    def _report(self, problem: str) -> None:
        with self._lock:
            is_new, self._reported = problem != self._reported, problem
        if is_new:
            self._on_outdated(f"{problem}; what is shown is what this machine has")


def _has_all_files(checkpoint: Path) -> bool:
    """Whether the files of a checkpoint are here, and not only its manifest."""
    with suppress(CheckpointDamaged):
        return all((checkpoint / name).is_file() for name in read_manifest(checkpoint)["files"])
    return False
