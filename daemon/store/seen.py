"""The state of the store that a run directory on this machine agrees with: a file in the directory.

A store that was restored from an older snapshot has an earlier version of the index: then the files
on this machine are the newer ones, and must be neither replaced nor removed.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import orjson

from ...jobs.errors import Conflict
from ...jobs.files.atomic import write_atomic
from .bucket import Bucket
from .index import Index

_NAME = ".seen"


class WentBack(Conflict):
    """The store has an earlier state of a job than this machine has seen."""


def note(folder: Path, now: Index) -> None:
    """Note that the files in a run directory agree with this index. Raises OSError."""
    if _version(folder) != now.version:
        write_atomic(folder / _NAME, orjson.dumps({"version": now.version}))


def is_earlier(folder: Path, now: Index) -> bool:
    """Whether this machine has seen a later index."""
    version = _version(folder)
    return version is not None and now.version < version


def check(bucket: Bucket, folder: Path, now: Index) -> None:
    """Raise WentBack if this machine has seen a later index."""
    if is_earlier(folder, now):
        raise WentBack(
            f"run store: {bucket.name} has an earlier state of {folder.name} than this machine, as "
            "after a restore from a snapshot: the files here are kept"
        )


def _version(folder: Path) -> int | None:
    with suppress(OSError, ValueError, TypeError, KeyError):
        return int(orjson.loads((folder / _NAME).read_bytes())["version"])
    return None
