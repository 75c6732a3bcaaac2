"""Retention: removes ended jobs of the queue infer ("answers"), the oldest first.

An agent sends thousands of requests a day; their run directories, hashes and streams would fill the
disk and the memory of Redis. Training jobs, evaluations and jobs with an input file are never
removed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import redis

from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict
from ...jobs.ids import is_job_id, kind_of
from ..host.image_store import ImageStore
from ..lifecycle import index, remove
from ..lifecycle.places import Places
from ..queue import keys
from ..queue.jobs import Job
from ..runs.rundir import RunDir
from ..store.bucket import StoreUnavailable

log = logging.getLogger(__name__)

GRACE_S = 10.0  # minimum age of an answer that is removed, so that its client can read it
_SCAN_S = 5.0  # between two scans for due answers
_FINISH_S = 60.0  # between two scans for removals that a killed process left half done
_RETRY_S = 0.5  # after the start, or after a failed preparation
_PAGE = 100  # answers per round trip to Redis
_MAX_BATCH_SPEC = 1_000_000  # bytes of the spec.json of a job with an input file


class Retention:
    """Removes the answers of one home as they become due."""

    def __init__(
        self,
        places: Places,
        *,
        keep_s: float | None,
        most: int,
        most_bytes: int,
    ) -> None:
        """`keep_s`: time after the end for which an answer is kept; None: forever.

        `most`, `most_bytes`: largest number and total size of the answers that are kept.
        """
        self._places = places
        self._keep_s = keep_s
        self._most = most
        self._most_bytes = most_bytes
        self._sizes: dict[str, int] = {}  # job id -> bytes on disk, of the answers that are kept
        self._seen_until = 0.0  # latest end of an answer in `_sizes`
        self._finish_at = 0.0
        self._stopping = threading.Event()

    def start(self, is_leader: Callable[[], bool]) -> None:
        """Start removing, in a thread: there may be thousands of due answers.

        `is_leader`: whether this daemon is currently the one on its Redis that removes answers.
        """
        run = partial(self._run, is_leader)
        threading.Thread(target=run, name="retention", daemon=True).start()

    def stop(self) -> None:
        """Stop after the current removal; the next start removes the others."""
        self._stopping.set()

    def _run(self, is_leader: Callable[[], bool]) -> None:
        is_prepared = False
        while not self._stopping.wait(_SCAN_S if is_prepared else _RETRY_S):
            try:
                if not is_leader():
                    continue
                if not is_prepared:
                    # Index jobs of earlier versions, and run directories that were copied in.
                    index.build(self._places.connection, self._places.runs)
                    is_prepared = True
                self.remove_due()
            except (redis.RedisError, StoreUnavailable, OSError) as error:
                log.warning("retention: %s", error)

    def remove_due(self) -> None:
        """Remove all due answers. Raises RedisError and OSError."""
        self._finish_removals()
        if self._keep_s is None:
            return
        removed = 0
        for job_id in self._due(self._places.store.shared_clock.now(), self._keep_s):
            if self._stopping.is_set():
                break
            removed += self._remove(job_id)
        if removed:
            ImageStore(self._places.runs).sweep()
            log.info("retention: %s answers removed", removed)

    def _finish_removals(self) -> None:
        """Finish interrupted removals, once per `_FINISH_S`: the scan reads all folder names."""
        if time.monotonic() > self._finish_at:
            remove.finish_all(self._places)
            self._finish_at = time.monotonic() + _FINISH_S

    def _due(self, now: float, keep_s: float) -> list[str]:
        """Return the due answers, ordered by their end."""
        connection = self._places.connection
        self._measure()
        number: Any = connection.zcard(keys.ANSWERS)
        excess = max(number - self._most, 0)
        old: Any = connection.zrangebyscore(keys.ANSWERS, "-inf", now - keep_s - GRACE_S)
        surplus = connection.zrange(keys.ANSWERS, 0, excess - 1, withscores=True) if excess else []
        over = [pair for pair in (*surplus, *self._too_large()) if _is_over(now - pair[1])]
        found = dict.fromkeys(keys.text(raw) for raw in (*old, *(raw for raw, _ in over)))
        return [job_id for job_id in found if job_id in self._sizes]

    def _measure(self) -> None:
        """Update `_sizes` with the answers that ended since the last call."""
        connection = self._places.connection
        since = f"({self._seen_until}"
        new: Any = connection.zrangebyscore(keys.ANSWERS, since, "+inf", withscores=True)
        self._add_sizes(new)
        if len(self._sizes) != connection.zcard(keys.ANSWERS):
            # Some were removed or resumed by other processes, or their end is by another clock.
            every: Any = connection.zrange(keys.ANSWERS, 0, -1, withscores=True)
            kept = {keys.text(raw) for raw, _ in every}
            self._sizes = {job_id: size for job_id, size in self._sizes.items() if job_id in kept}
            self._add_sizes(every)

    def _add_sizes(self, ended: list[tuple[bytes, float]]) -> None:
        """Add the sizes of new answers; delete the index entries of jobs that are kept."""
        if self._places.remote is not None:
            new = [keys.text(raw) for raw, _ in ended if keys.text(raw) not in self._sizes]
            self._places.remote.refresh_summaries(list(filter(is_job_id, new)))
        for raw, at in ended:
            job_id = keys.text(raw)
            self._seen_until = max(self._seen_until, at)
            if job_id in self._sizes:
                continue
            if not is_job_id(job_id) or _is_kept(RunDir(self._places.runs / job_id)):
                self._places.connection.zrem(keys.ANSWERS, raw)
            else:
                self._sizes[job_id] = remove.size_bytes(self._places.runs / job_id)

    def _too_large(self) -> list[tuple[bytes, float]]:
        """Return the oldest answers that must be removed for the others to fit `most_bytes`."""
        found: list[tuple[bytes, float]] = []
        surplus = sum(self._sizes.values()) - self._most_bytes
        while surplus > 0:
            start = len(found)
            page: Any = self._places.connection.zrange(
                keys.ANSWERS, start, start + _PAGE - 1, withscores=True
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
        """Remove one job; return False if it is kept."""
        if self._places.connection.exists(Job.dependents_key_for(job_id)):
            return False  # other jobs wait for it (--after)
        try:
            remove.remove(self._places, job_id)
        except Conflict:  # it was resumed just now
            return False
        self._sizes.pop(job_id, None)
        return True


def _is_over(age_s: float) -> bool:
    """Whether the grace period of an answer is over.

    An end far in the future means that the clock was set back. It counts as long ago: otherwise the
    limits would not be enforced until then.
    """
    return not -GRACE_S < age_s < GRACE_S


def _is_kept(rundir: RunDir) -> bool:
    """Whether the job is an evaluation or has an input file: then its run directory is kept."""
    kind = kind_of(rundir.path.name)
    if kind in KINDS and spec_class(kind).is_kept:
        return True
    with suppress(Conflict, FileNotFoundError):  # an unreadable job can be removed
        # A larger spec contains its prompt, so it has no input file; do not parse gigabytes.
        is_short = (rundir.path / "spec.json").stat().st_size <= _MAX_BATCH_SPEC
        return is_short and bool(rundir.read_spec()["spec"].get("input"))
    return False
