"""The worker's side of run directories in a run store.

When an execution begins, the run directory is fetched. When it ends, the worker notifies the
uploader and waits until everything is in the store: a training has not ended while its result could
still be lost with this machine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from ...configs.queues import TRAIN
from ...jobs.files.shortage import no_process
from ..host.home import Home
from ..store.bucket import Bucket
from ..store.pending import PendingUploads
from .attempt import Attempt
from .run_fetches import RunFetch

log = logging.getLogger(__name__)

_CHECK_S = 1.0  # between two checks whether uploads fail


class StoredRuns:
    """The run directories of a worker's attempts."""

    def __init__(self, home: Home, bucket: Bucket) -> None:
        self._home = home
        self._bucket = bucket
        self._pending = PendingUploads(home)
        self._checked_at = 0.0
        self._marked: set[tuple[str, int]] = set()  # executions whose end was noted

    def begin(self, attempt: Attempt) -> None:
        """Start to fetch the run directory of an attempt."""
        attempt.is_stored = attempt.job.origin != TRAIN
        attempt.fetch = RunFetch(self._home, self._bucket, attempt.job.id, attempt.started.number)

    def advance(self, attempts: Sequence[Attempt]) -> list[Attempt]:
        """Return the attempts whose run directories have become complete."""
        complete = []
        for attempt in attempts:
            fetch = attempt.fetch
            if fetch is None:
                continue
            if attempt.has_ended:  # canceled meanwhile
                fetch.cancel()
                attempt.fetch = None
                continue
            is_started = fetch.start()
            attempt.set_lacking(fetch.lacks if is_started else no_process("can't start a thread"))
            is_done = fetch.is_done  # read before the other attributes, which are set first
            if fetch.is_open and not attempt.has_rundir:
                attempt.set_rundir(fetch.rundir)
                if fetch.problem is not None:
                    attempt.warn(fetch.problem)
            attempt.report_fetch()
            if not is_done:
                continue
            attempt.fetch = None
            attempt.set_lacking(None)
            if fetch.is_superseded:
                attempt.supersede()
            elif fetch.failure is not None:
                attempt.fail(fetch.failure)
            else:
                complete.append(attempt)
        self._report_problem(attempts)
        return complete

    def end(self, attempt: Attempt) -> bool:
        """Note that an attempt has ended, for the uploader; return whether to report its end."""
        execution = (attempt.job.id, attempt.started.number)
        if not attempt.has_rundir:
            attempt.is_stored = True
        elif execution not in self._marked:
            try:
                self._mark(*execution)
            except OSError as error:
                log.error("%s: its end cannot be noted for the upload: %s", execution[0], error)
                return False
            self._marked.add(execution)
        if not attempt.is_stored and self._is_uploaded(*execution):
            attempt.is_stored = True
        if attempt.is_stored:
            self._marked.discard(execution)
        return attempt.is_stored

    def _mark(self, job_id: str, execution: int) -> None:
        pending = self._pending.read(job_id)
        if pending is not None and pending.execution == execution:
            self._pending.write(job_id, replace(pending, has_ended=True))

    def _is_uploaded(self, job_id: str, execution: int) -> bool:
        if self._pending.is_uploaded(job_id):
            return True
        pending = self._pending.read(job_id)  # None: it cannot be read just now
        return pending is not None and pending.execution != execution

    def _report_problem(self, attempts: Sequence[Attempt]) -> None:
        if time.monotonic() - self._checked_at < _CHECK_S:
            return
        self._checked_at = time.monotonic()
        for attempt in attempts:
            if attempt.has_rundir and attempt.job.origin == TRAIN:
                problem: str | None = None
                with suppress(OSError):
                    problem = self._pending.problem(attempt.job.id)
                attempt.note_store(problem)
