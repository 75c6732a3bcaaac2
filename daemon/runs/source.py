"""The source of a job: its code and versions, in `source/` of its run directory.

source.json    the folder it was submitted from, its git commit, the digests of its data files;
               and for each execution the versions of libraries and the user modules it imported
git.diff       changes of that folder that were not committed
files/DIGEST   the content of each user module

The client writes the first part at submission, the horse the second when the job has imported its
modules. Jobs of earlier versions have none.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
import xxhash

from ...jobs.files import records
from ...jobs.files.atomic import write_atomic
from ...jobs.libraries import versions
from ...jobs.user_code import modules
from .git import GitState, state_of
from .rundir import RunDir

_NAME = "source.json"
_MAX_FILE_BYTES = 1_000_000  # largest user module that is copied
_MAX_FILES = 1000
_MAX_DATA_BYTES = 256_000_000  # largest data file that is hashed; else size and time
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Execution:
    """The code and versions of one execution of a job."""

    number: int
    versions: Mapping[str, str]
    files: Mapping[str, str]  # path of each imported user module -> sha256


@dataclass(frozen=True)
class Source:
    """The code and versions of a job."""

    folder: str | None = None  # that it was submitted from
    git: Mapping[str, Any] | None = None  # commit, branch, changed
    data: Mapping[str, Any] = field(default_factory=dict)  # option -> path, bytes, digest or time
    executions: tuple[Execution, ...] = ()

    def changes(self) -> dict[int, list[str]]:
        """Return the changes before each execution: paths of modules, and versions."""
        found = {}
        for before, after in zip(self.executions, self.executions[1:], strict=False):
            changed = [
                f"{name} {before.versions.get(name)}, now {now}"
                for name, now in after.versions.items()
                if before.versions.get(name) != now
            ]
            changed += [
                path
                for path in sorted(before.files.keys() | after.files.keys())
                if before.files.get(path) != after.files.get(path)
            ]
            if changed:
                found[after.number] = changed
        return found


def record_submission(
    rundir: RunDir,
    spec: Mapping[str, Any],
    folder: Path,
    git_state: Callable[[], GitState | None] | None = None,
) -> None:
    """Record the source as of submission from `folder`.

    `spec`: the options, with absolute paths. `git_state` returns the state of the folder's work
    tree, where the caller has begun to read it.
    """
    git = state_of(folder) if git_state is None else git_state()
    about = None
    if git is not None:
        about = {
            "commit": git.commit,
            "branch": git.branch,
            "changed": git.changed[:_MAX_FILES],
            "diff_bytes": git.diff_bytes,
        }
    place = _place(rundir)
    place.mkdir(mode=0o700, exist_ok=True)
    if git is not None and git.diff:
        write_atomic(place / "git.diff", git.diff)
    _write(place, Source(folder=str(folder), git=about, data=_data(spec)))


def record_execution(rundir: RunDir, number: int) -> None:
    """Record the modules imported for an execution. Raises OSError on a full disk."""
    place = _place(rundir)
    (place / "files").mkdir(mode=0o700, parents=True, exist_ok=True)
    files = {}
    for path in sorted(modules.digests())[:_MAX_FILES]:
        with suppress(FileNotFoundError):  # removed meanwhile
            content = Path(path).read_bytes()
            files[path] = digest = sha256(content).hexdigest()
            kept = kept_file(rundir, digest)
            if len(content) <= _MAX_FILE_BYTES and not kept.is_file():
                write_atomic(kept, content)
    found = read(rundir)
    others = (e for e in found.executions if e.number != number)
    _write(place, replace(found, executions=(*others, Execution(number, _versions(), files))))


def read(rundir: RunDir) -> Source:
    """Return the source of a job; empty if unknown or damaged."""
    return records.read(_place(rundir) / _NAME, Source) or Source()


def kept_file(rundir: RunDir, digest: str) -> Path:
    """Return the path of the copy of a user module."""
    return _place(rundir) / "files" / digest


def diff_file(rundir: RunDir) -> Path:
    """Return the path of the changes that were not committed; it may not exist."""
    return _place(rundir) / "git.diff"


def _place(rundir: RunDir) -> Path:
    return rundir.path / "source"


def _write(place: Path, found: Source) -> None:
    write_atomic(place / _NAME, orjson.dumps(found, option=orjson.OPT_INDENT_2))


def _versions() -> dict[str, str]:
    """The versions of Python and of the libraries that compute."""
    return {"python": platform.python_version(), **versions()}


def _data(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The files that options name: path, size, and digest or time of change."""
    found: dict[str, Any] = {}
    for name, value in spec.items():
        path = Path(value) if isinstance(value, str) and value.startswith("/") else None
        with suppress(OSError, ValueError):
            if path is not None and path.is_file():
                stat = path.stat()
                known = {"path": str(path), "bytes": stat.st_size}
                if stat.st_size <= _MAX_DATA_BYTES:
                    found[name] = {**known, "digest": _digest(path)}
                else:
                    found[name] = {**known, "modified": stat.st_mtime}
    return found


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()
