"""Removes old answers: ended jobs of the queue infer, the oldest first. Never a training job.

An agent sends thousands of requests a day. The run directory, hash and stream of each would
otherwise fill the disk and the memory of Redis.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import Any

import redis

from ...jobs.errors import Conflict
from ..host.home import Home
from ..host.image_store import ImageStore
from ..queue import index_builder, keys, removal
from ..queue.jobs import Job, JobStore
from ..runs.rundir import RunDir, is_job_id

log = logging.getLogger(__name__)

GRACE_S = 10.0  # for clients to read an answer after its end, however many answers there are
_LOOK_S = 5.0  # between two looks for what is due
_FINISH_S = 60.0  # between two scans for removals that a killed process left half done
_SOON_S = 0.5  # after the start, or after a try that failed
_AT_ONCE = 100  # answers that are read in one round trip
_LONGEST_OF_ROWS = 1_000_000  # bytes of the spec.json of a job on a file


class Retention:
    """Removes the answers of one home as they become due."""

    def __init__(
        self,
        store: JobStore,
        home: Home,
        *,
        keep_s: float | None,
        most: int,
        most_bytes: int,
    ) -> None:
        """`keep_s`: after its end; None keeps all. `most`, `most_bytes`: that are kept at all."""
        self._store = store
        self._home = home
        self._keep_s = keep_s
        self._most = most
        self._most_bytes = most_bytes
        self._sizes: dict[str, int] = {}  # bytes on disk of each answer that is kept
        self._seen_until = 0.0  # the latest end among them
        self._finish_at = 0.0
        self._stopping = threading.Event()

    def start(self) -> None:
        """Look and remove from now on, in a thread: after a night there may be thousands."""
        threading.Thread(target=self._run, name="retention", daemon=True).start()

    def stop(self) -> None:
        """End after the job that is being removed. What is left stays for the next start."""
        self._stopping.set()

    def _run(self) -> None:
        is_prepared = False
        while not self._stopping.wait(_LOOK_S if is_prepared else _SOON_S):
            try:
                if not is_prepared:
                    # What a daemon of an earlier version, or somebody by hand, has left.
                    index_builder.build(self._store.connection, self._home.runs)
                    is_prepared = True
                self.remove_due()
            except (redis.RedisError, OSError) as error:
                log.warning("retention: %s", error)

    def remove_due(self) -> None:
        """Remove all that is due. Raises RedisError and OSError."""
        self._finish_removals()
        if self._keep_s is None:
            return
        removed = 0
        for job_id in self._due(time.time(), self._keep_s):
            if self._stopping.is_set():
                break
            removed += self._remove(job_id)
        if removed:
            ImageStore(self._home.runs).sweep()
            log.info("retention: %s answers removed", removed)

    def _finish_removals(self) -> None:
        """Finish what others began, now and then: to look for it, all names are read."""
        if time.monotonic() > self._finish_at:
            removal.finish_all(self._store, self._home.runs)
            self._finish_at = time.monotonic() + _FINISH_S

    def _due(self, now: float, keep_s: float) -> list[str]:
        """Return the answers that are due, those first that ended first."""
        connection = self._store.connection
        self._measure()
        number: Any = connection.zcard(keys.ANSWERS)
        excess = max(number - self._most, 0)
        old: Any = connection.zrangebyscore(keys.ANSWERS, "-inf", now - keep_s - GRACE_S)
        surplus = connection.zrange(keys.ANSWERS, 0, excess - 1, withscores=True) if excess else []
        over = [pair for pair in (*surplus, *self._too_large()) if _is_over(now - pair[1])]
        found = dict.fromkeys(keys.text(raw) for raw in (*old, *(raw for raw, _ in over)))
        return [job_id for job_id in found if job_id in self._sizes]

    def _measure(self) -> None:
        """Learn the size of each answer that is new; leave out what is to stay."""
        connection = self._store.connection
        since = f"({self._seen_until}"
        new: Any = connection.zrangebyscore(keys.ANSWERS, since, "+inf", withscores=True)
        self._note(new)
        if len(self._sizes) != connection.zcard(keys.ANSWERS):
            # Some were removed or resumed by others, or ended by another machine's clock.
            every: Any = connection.zrange(keys.ANSWERS, 0, -1, withscores=True)
            kept = {keys.text(raw) for raw, _ in every}
            self._sizes = {job_id: size for job_id, size in self._sizes.items() if job_id in kept}
            self._note(every)

    def _note(self, ended: list[tuple[bytes, float]]) -> None:
        for raw, at in ended:
            job_id = keys.text(raw)
            self._seen_until = max(self._seen_until, at)
            if job_id in self._sizes:
                continue
            if not is_job_id(job_id) or _is_of_rows(RunDir(self._home.runs / job_id)):
                self._store.connection.zrem(keys.ANSWERS, raw)
            else:
                self._sizes[job_id] = removal.size_bytes(self._home.runs / job_id)

    def _too_large(self) -> list[tuple[bytes, float]]:
        """Return the oldest answers, as many as are to go for the others to have room."""
        found: list[tuple[bytes, float]] = []
        surplus = sum(self._sizes.values()) - self._most_bytes
        while surplus > 0:
            start = len(found)
            page: Any = self._store.connection.zrange(
                keys.ANSWERS, start, start + _AT_ONCE - 1, withscores=True
            )
            if not page:
                break
            for raw, at in page:
                if surplus <= 0:
                    break
                found.append((raw, at))
                surplus -= self._sizes.get(keys.text(raw), 0)
        return found

    def _remove(self, job_id: str) -> bool:
        """Forget one job; False when it is kept."""
        if self._store.connection.exists(Job.dependents_key_for(job_id)):
            return False  # others are behind it
        try:
            removal.remove(self._store, self._home.runs, job_id)
        except Conflict:  # resumed this moment
            return False
        self._sizes.pop(job_id, None)
        return True


def _is_over(age_s: float) -> bool:
    """Whether the grace of an answer is over.

    An end far in the future is one before the clock was put back: it counts as long ago, since
    otherwise the limits would not hold until that time comes.
    """
    return not -GRACE_S < age_s < GRACE_S


def _is_of_rows(rundir: RunDir) -> bool:
    """Whether it answers a file of rows, which somebody will want to look at."""
    with suppress(Conflict, FileNotFoundError):  # of what cannot be read nothing is lost
        # A longer one holds its question itself, and there may be gigabytes of them.
        is_short = (rundir.path / "spec.json").stat().st_size <= _LONGEST_OF_ROWS
        return is_short and bool(rundir.read_spec()["spec"].get("input"))
    return False
