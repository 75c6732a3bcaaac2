"""The state of the store that a run directory on this machine agrees with: a file in the directory.

A store that was restored from an older snapshot has an earlier version of the index: then the files
on this machine are the newer ones, and must be neither replaced nor removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from ...jobs.errors import Conflict
from ...jobs.files import records
from ...jobs.files.atomic import write_atomic
from .bucket import Bucket
from .index import Index

_NAME = ".seen"


@dataclass(frozen=True)
class _Seen:
    version: int  # of the index


class WentBack(Conflict):
    """The store has an earlier state of a job than this machine has seen."""


def note(folder: Path, now: Index) -> None:
    """Note that the files in a run directory agree with this index. Raises OSError."""
    if (seen := _Seen(now.version)) != records.read(folder / _NAME, _Seen):
        write_atomic(folder / _NAME, orjson.dumps(seen))


def is_earlier(folder: Path, now: Index) -> bool:
    """Whether this machine has seen a later index."""
    seen = records.read(folder / _NAME, _Seen)
    return seen is not None and now.version < seen.version


def check(bucket: Bucket, folder: Path, now: Index) -> None:
    """Raise WentBack if this machine has seen a later index."""
    if is_earlier(folder, now):
        raise WentBack(
            f"run store: {bucket.name} has an earlier state of {folder.name} than this machine, as "
            "after a restore from a snapshot: the files here are kept"
        )
