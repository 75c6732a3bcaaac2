"""The uploader's process: `python -m warmd.daemon.store HOME PARENT`, its settings on stdin.

All its work can be repeated: after a kill the next process repeats uploads that were not committed.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.files.atomic import write_atomic
from ..host.backoff import backoff_s
from ..host.home import Home
from ..host.messages import UploaderSettings, decode
from ..host.parent_death import end_with_parent
from ..runs.fence import NAME as FENCE_NAME, Superseded
from ..runs.rundir import RunDir
from . import copies, index
from .bucket import Bucket, StoreUnavailable
from .pending import PendingUploads
from .upload import RunUpload, remove_leftovers

log = logging.getLogger(__name__)

_TICK_S = 0.2
_MAX_WAIT_S = 30.0  # between two attempts while the store is unavailable
_THREADS = 4  # jobs that are uploaded at the same time
_SWEEP_S = 600.0  # between two checks for copies of removed jobs
_NICENESS = 10  # lower priority than the training's


@dataclass(frozen=True)
class _Retry:
    """When a job whose uploads fail is tried again."""

    failures: int  # in a row
    at: float


class Uploader:
    """Uploads the pending run directories of one home."""

    def __init__(self, home: Home, bucket: Bucket) -> None:
        self._runs = home.runs
        self._bucket = bucket
        self._pending = PendingUploads(home)
        self._uploads: dict[str, RunUpload] = {}
        self._running: dict[str, Future[bool]] = {}
        self._pool = ThreadPoolExecutor(_THREADS)
        self._retries: dict[str, _Retry] = {}  # of the jobs whose latest upload has failed
        self._sweep_at = time.monotonic() + _SWEEP_S

    def run(self) -> None:
        """Upload until the process ends."""
        self._pending.clear_problems()
        while True:
            self.iterate()
            time.sleep(_TICK_S)

    def iterate(self) -> None:
        """One iteration: handle the uploads that have ended, and start those that are due."""
        self._collect()
        for job_id in self._pending.jobs():
            if job_id not in self._running and self._may_try(job_id):
                self._running[job_id] = self._pool.submit(self._advance, job_id)
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + _SWEEP_S
            self._sweep()

    def _may_try(self, job_id: str) -> bool:
        retry = self._retries.get(job_id)
        return retry is None or time.monotonic() >= retry.at

    def _sweep(self) -> None:
        try:
            for job_id in copies.remove_outdated(self._bucket, self._runs, self._pending):
                log.info("%s: local copy removed, it is not in the run store any more", job_id)
        except (StoreUnavailable, OSError) as error:
            log.warning("run store: copies of removed jobs stay for now: %s", error)

    def _collect(self) -> None:
        """Handle the results of the threads."""
        for job_id, future in list(self._running.items()):
            if not future.done():
                continue
            del self._running[job_id]
            try:
                has_uploaded = future.result()
            except StoreUnavailable as error:
                self._uploads.pop(job_id, None)  # its view of the store may be out of date
                self._note_failure(job_id, str(error))
            except OSError as error:  # a file of the job, or the local disk
                self._uploads.pop(job_id, None)
                self._note_failure(job_id, f"upload: {error}")
            else:
                if has_uploaded:
                    self._note_success(job_id)

    def _advance(self, job_id: str) -> bool:
        """Upload the due files of a job; return whether any were due.

        Raises StoreUnavailable and OSError.
        """
        pending = self._pending.read(job_id)
        if pending is None:
            if not self._pending.is_uploaded(job_id):
                raise OSError(f"{self._pending.folder / job_id} cannot be read: remove it")
            return False
        rundir = RunDir(self._runs / job_id)
        try:
            if not (rundir.path / "spec.json").is_file():
                raise NotFound("its run directory has gone")
            upload = self._uploads.get(job_id)
            if upload is None or upload.execution != pending.execution:
                upload = self._uploads[job_id] = RunUpload(self._bucket, rundir, pending)
            if not pending.has_ended and not upload.is_due():
                return False
            upload.advance(is_last=pending.has_ended)
            if pending.has_ended:
                upload.remove_unused()
                self._finish(job_id, pending.execution)
        except Superseded as error:
            log.warning("%s", error)
            self._raise_fence(rundir)
            remove_leftovers(self._bucket, job_id)
            self._finish(job_id, pending.execution)
        except (Conflict, NotFound) as error:  # it was removed, or its index is damaged
            log.error("%s: not uploaded: %s", job_id, error)
            remove_leftovers(self._bucket, job_id)
            self._finish(job_id, pending.execution)
        return True

    def _finish(self, job_id: str, execution: int) -> None:
        """Forget an upload, unless the next execution has begun here meanwhile."""
        self._uploads.pop(job_id, None)
        with self._pending.fetching(job_id):
            now = self._pending.read(job_id)
            if now is not None and now.execution == execution:
                self._pending.remove(job_id)

    def _raise_fence(self, rundir: RunDir) -> None:
        """Make the superseded execution on this machine end: it may still compute."""
        try:
            latest = index.read(self._bucket, rundir.path.name).execution
        except (NotFound, Conflict):
            return
        write_atomic(rundir.path / FENCE_NAME, b"%d\n" % latest)

    def _note_failure(self, job_id: str, problem: str) -> None:
        """Try this job again after a while; the others are not delayed."""
        failures = 0
        if job_id in self._retries:
            failures = self._retries[job_id].failures
        else:
            log.error("%s: %s; uploads are retried", job_id, problem)
            with suppress(OSError):  # the local disk is full
                self._pending.note_problem(job_id, problem)
        wait_s = backoff_s(failures, first_s=1.0, longest_s=_MAX_WAIT_S)
        self._retries[job_id] = _Retry(failures + 1, time.monotonic() + wait_s)

    def _note_success(self, job_id: str) -> None:
        if self._retries.pop(job_id, None) is not None:
            log.info("%s: %s can be written again", job_id, self._bucket.name)
            with suppress(OSError):
                self._pending.note_problem(job_id, None)


def main() -> None:
    """Upload until the supervisor is gone."""
    end_with_parent(int(sys.argv[2]))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = decode(sys.stdin.buffer.read())
    assert isinstance(settings, UploaderSettings)
    os.nice(_NICENESS)
    try:
        bucket = Bucket(settings.runs)
    except (SpecError, StoreUnavailable) as error:
        raise SystemExit(str(error)) from None
    Uploader(Home(Path(sys.argv[1])), bucket).run()


if __name__ == "__main__":
    main()
