"""Removes local copies of run directories that other machines have removed from the store.

Only copies of directories that were in the same store: each copy has a mark with the store's id, so
that another bucket, or an emptied one, never leads to the removal of a run directory. And only of
those whose removal is noted in the store: after a restore from an older snapshot, jobs are missing
without having been removed.
"""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path

from ...jobs.files.atomic import write_atomic
from ...jobs.ids import is_job_id
from ..runs.rundir import RunDir, job_ids
from .bucket import Bucket
from .pending import PendingUploads

ID = ".id"  # the object with the random id of a store
_MARK = ".store"  # in a run directory: the id of the store that has it
_REMOVED = ".removed"  # the folder with an empty object for each removed job
_GRACE_S = 3600.0  # minimum age of a copy that is removed


def mark(bucket: Bucket, folder: Path) -> None:
    """Note that a run directory is in this store. Raises OSError."""
    path = folder / _MARK
    if not path.exists() and (found := bucket.get(ID)) is not None:
        write_atomic(path, found.data)


def note_removal(bucket: Bucket, job_id: str) -> None:
    """Note that a person has removed a job from the store."""
    bucket.put(f"{_REMOVED}/{job_id}", b"")


def remove_outdated(bucket: Bucket, runs: Path, pending: PendingUploads) -> list[str]:
    """Remove the copies of jobs that are not in the store any more; return their ids."""
    found = bucket.get(ID)
    if found is None:
        return []
    stored = set(filter(is_job_id, bucket.folders()))
    missing = set(job_ids(runs)) - stored
    if not missing:
        return []
    gone = {key.removeprefix(f"{_REMOVED}/") for key in bucket.sizes(_REMOVED)}
    removed = []
    for job_id in missing & gone:
        with pending.fetching(job_id), suppress(FileNotFoundError):
            rundir = RunDir(runs / job_id)
            is_ours = (rundir.path / _MARK).read_bytes() == found.data
            is_old = time.time() - rundir.path.stat().st_mtime > _GRACE_S
            if is_ours and is_old and pending.is_uploaded(job_id) and not rundir.is_held():
                shutil.rmtree(rundir.path)
                removed.append(job_id)
    return removed
