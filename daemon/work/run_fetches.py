"""Fetches a job's run directory from the run store to this machine, in a thread of the worker.

The worker's loop polls the fetch, so it never waits for the network.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from ...jobs import KINDS, spec_class
from ...jobs.errors import NotFound, WarmdError
from ...jobs.files.shortage import Patience, Shortage
from ...jobs.ids import is_job_id
from ..host.home import Home
from ..runs.fence import Superseded
from ..runs.rundir import RunDir, trainer_of
from ..store import fetching
from ..store.bucket import Bucket, StoreUnavailable

log = logging.getLogger(__name__)

_MAX_WAIT_S = 30.0  # between two attempts while the store is unavailable
_REPORT_S = 0.5  # between two reports of progress
_NAMED_S = 0.5  # between two looks for the result of a job that this one names
_MAX_NAMED_S = 600.0  # for the machine that ran it to upload it


class _Canceled(Exception):
    """Nobody needs the run directory any more."""


class RunFetch:
    """Makes one run directory complete; its attributes are read by the worker's loop."""

    def __init__(self, home: Home, bucket: Bucket, job_id: str, execution: int) -> None:
        self.rundir = RunDir(home.runs / job_id)
        self.is_open = False  # spec, labels and events are here
        self.is_done = False
        self.lacks: Shortage | None = None  # the shortage that it waits for
        self.is_superseded = False  # a later execution has claimed the job
        self.failure: str | None = None  # why the job cannot be run
        self.problem: str | None = None  # damage in the store that does not prevent the execution
        self.name = ""  # of the checkpoint that is being fetched, or "files"
        self.bytes = 0  # fetched of it so far
        self.total_bytes = 0
        self._home = home
        self._bucket = bucket
        self._execution = execution
        self._reported_at = 0.0
        self._canceled = threading.Event()
        self._thread: threading.Thread | None = None
        self.start()

    def start(self) -> bool:
        """Start the thread, unless it runs; False while the machine can start none."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="fetch", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def cancel(self) -> None:
        """End the thread soon."""
        self._canceled.set()

    def progress_if_due(self) -> dict[str, Any] | None:
        """Return the fields of a progress event; None without progress or within _REPORT_S."""
        if not self.total_bytes or time.monotonic() - self._reported_at < _REPORT_S:
            return None
        self._reported_at = time.monotonic()
        return {"name": self.name, "bytes": self.bytes, "total_bytes": self.total_bytes}

    def _run(self) -> None:
        wait_s = 0.0
        patience = Patience(self._canceled, on_change=self._note_wait)
        try:
            while not self._canceled.wait(wait_s):
                try:
                    patience.write(self._fetch, self.rundir.path)
                    return
                except StoreUnavailable as error:
                    if wait_s == 0.0:
                        log.error("%s: %s; it is tried again", self.rundir.path.name, error)
                    wait_s = min(2 * wait_s + 1, _MAX_WAIT_S)
        except _Canceled:
            pass
        except Superseded as error:
            log.warning("%s", error)
            self.is_superseded = True
        except WarmdError as error:
            self.failure = str(error)
        except OSError as error:
            self.failure = f"run directory: {error}"
        except Exception as error:  # a damaged spec: without a failure it would begin anew
            log.exception("%s: not fetched", self.rundir.path.name)
            self.failure = f"run directory: {type(error).__name__}: {error}"
        finally:
            self.is_done = True

    def _fetch(self) -> None:
        job_id = self.rundir.path.name
        now = fetching.open_rundir(
            self._home, self._bucket, job_id, self._execution, on_problem=self._note_problem
        )
        self.is_open = True
        fetching.fetch_large(
            self._bucket, self.rundir, now, on_begin=self._begin, on_bytes=self._count
        )
        document = self.rundir.read_spec()
        for name in spec_class(document["kind"]).names_jobs if document["kind"] in KINDS else ():
            if is_job_id(named := document["spec"].get(name) or ""):
                self._fetch_named(named)
        model = document.get("model")
        trainer = None if model is None else trainer_of(model["path"])
        if trainer is not None and trainer != job_id:
            fetching.fetch_model(
                self._home, self._bucket, trainer, on_begin=self._begin, on_bytes=self._count
            )
        fetching.fetch_checkpoint(
            self._bucket, self.rundir, now, on_begin=self._begin, on_bytes=self._count
        )

    def _fetch_named(self, job_id: str) -> None:
        """Fetch a job that this one names, once the machine that ran it has uploaded it."""
        until = time.monotonic() + _MAX_NAMED_S
        while True:
            try:
                fetching.fetch_named(self._home, self._bucket, job_id)
                return
            except fetching.NotUploaded as error:
                if time.monotonic() > until:
                    raise NotFound(f"{error}, which its machine has not uploaded") from None
            if self._canceled.wait(_NAMED_S):
                raise _Canceled

    def _note_wait(self, lacking: Shortage | None) -> None:
        self.lacks = lacking

    def _note_problem(self, problem: str) -> None:
        log.warning("%s: %s", self.rundir.path.name, problem)
        self.problem = problem

    def _begin(self, name: str, total_bytes: int) -> None:
        self.name, self.bytes, self.total_bytes = name, 0, total_bytes

    def _count(self, number: int) -> None:
        if self._canceled.is_set():
            raise _Canceled
        self.bytes += number
