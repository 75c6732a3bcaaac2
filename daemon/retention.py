"""Answers that nobody asks for any more: jobs of the queue infer are removed some time after their
end, the oldest first. A training job is never touched.

An agent asks thousands of times a day. What each answer leaves, a run directory, a hash and a
stream, would otherwise fill the disk and the server's memory.
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from contextlib import suppress
from datetime import datetime
from fcntl import LOCK_EX, LOCK_NB
from pathlib import Path

import redis
from rq.job import Job

from ..jobs.durable import locked
from ..jobs.errors import Conflict
from . import joblist
from .home import Home
from .jobstore import JobStore
from .rundir import RunDir, is_job_id

log = logging.getLogger(__name__)

QUEUE = "infer"
GRACE_S = 10.0  # in which whoever waits for an answer can read it, however many there are
_LOOK_S = 5.0  # between two looks for what is due


class Retention:
    """Removes the answers of one home as they become due."""

    def __init__(self, store: JobStore, home: Home, *, keep_s: float | None, most: int) -> None:
        """`keep_s`: after its end; None keeps all. `most`: that are kept at all."""
        self._store = store
        self._home = home
        self._keep_s = keep_s
        self._most = most
        self._stopping = threading.Event()

    def start(self) -> None:
        """Look and remove from now on, in a thread: after a night there may be thousands."""
        if self._keep_s is not None:
            threading.Thread(target=self._run, name="retention", daemon=True).start()

    def stop(self) -> None:
        """End after the job that is being removed. What is left stays for the next start."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(_LOOK_S):
            try:
                self.remove_due()
            except (redis.RedisError, OSError) as error:
                log.warning("retention: %s", error)

    def remove_due(self) -> None:
        """Remove all that is due. Raises RedisError and OSError."""
        if self._keep_s is None:
            return
        removed = 0
        with suppress(BlockingIOError), locked(self._home.runs, LOCK_EX | LOCK_NB):
            # One of the daemons that share the folder at a time: what one is burying is no half.
            self._bury_halves()
            for job_id in self._find(time.time(), self._keep_s):
                if self._stopping.is_set():
                    break
                removed += self._remove(job_id)
        if removed:
            log.info("retention: %s answers removed", removed)

    def _find(self, now: float, keep_s: float) -> list[str]:
        """Return the jobs that are due, those first that ended first."""
        connection = self._store.connection
        ids = joblist.ended(connection, QUEUE)
        if not ids:
            return []
        with connection.pipeline(transaction=False) as pipeline:
            for job_id in ids:
                pipeline.hget(Job.key_for(job_id), "ended_at")
                pipeline.exists(Job.dependents_key_for(job_id))
            found = pipeline.execute()
        ended = sorted(
            (_seconds(raw), job_id)
            for job_id, raw, has_dependents in zip(ids, found[::2], found[1::2], strict=True)
            if not has_dependents  # others are behind it
        )
        excess = len(ended) - self._most
        return [
            job_id
            for place, (at, job_id) in enumerate(ended)
            if is_job_id(job_id) and now - at >= (GRACE_S if place < excess else keep_s + GRACE_S)
        ]

    def _remove(self, job_id: str) -> bool:
        """Forget one job; False when it is kept.

        Its files leave their name first: a job that the server does not know, and whose run
        directory is there, is one that the gateway is about to queue.
        """
        rundir = RunDir(self._home.runs / job_id)
        with suppress(Conflict):  # of what cannot be read nothing is lost
            if rundir.read_spec()["spec"].get("input"):
                return False  # of a file of rows, which somebody will want to look at
        job = self._store.fetch(job_id)
        if job is None:
            return False
        grave = self._home.runs / f".removed-{job_id}"
        with suppress(FileNotFoundError):
            rundir.path.rename(grave)
        if not self._store.remove(job):  # resumed this moment
            grave.rename(rundir.path)
            return False
        shutil.rmtree(grave, ignore_errors=True)
        return True

    def _bury_halves(self) -> None:
        """Finish what a supervisor that died had begun."""
        for grave in self._home.runs.glob(".removed-*"):
            job_id = grave.name.removeprefix(".removed-")
            job = self._store.fetch(job_id)
            if job is not None and not self._store.remove(job):
                _give_back(grave, self._home.runs / job_id)
            else:
                shutil.rmtree(grave, ignore_errors=True)


def _give_back(grave: Path, place: Path) -> None:
    if not place.exists():
        grave.rename(place)


def _seconds(raw: bytes | None) -> float:
    """When a job ended, in unix seconds; 0 when that is not known."""
    try:
        return datetime.fromisoformat((raw or b"").decode()).timestamp()
    except ValueError:
        return 0.0
