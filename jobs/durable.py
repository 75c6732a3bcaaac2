"""Files and folders that appear on disk whole or not at all, whatever dies while they are written.

A folder is filled under a hidden name beside its place, flushed, and renamed. A lock on the parent
folder, which the kernel takes from a dead process, tells leftovers from work in progress.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_STAGING = ".staging-"  # being filled; never valid
_REPLACED = ".replaced-"  # the former folder, put aside while the new one takes its place


def write_atomic(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace the file `path`, whole or not at all."""
    with whole_file(path, mode=mode) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Give an empty file to write; leaving the block makes it `path`, replacing what was there.

    An exception in the block, or while flushing (a full disk), leaves `path` as it was. Two that
    write beside each other take turns, and write over what a dead one has left.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    with open(_open_alone(temporary, mode), "wb") as file:
        try:
            file.truncate()
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    fsync(path.parent)


def _open_alone(path: Path, mode: int) -> int:
    """Return a descriptor of a file that nobody else has from here and has not closed yet."""
    while True:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, mode)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)  # whoever had it has renamed or removed it meanwhile


def fsync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Give an empty folder to fill; leaving the block makes it `target`, replacing what was there.

    An exception in the block, or while flushing (a full disk), leaves `target` as it was. Two
    processes that write beside each other take turns.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = target.with_name(_STAGING + target.name)
    with locked(target.parent):
        _sweep(target.parent)
        staging.mkdir()
        try:
            yield staging
            _flush(staging)
            _put(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


def recover(parent: Path) -> None:
    """Undo what a dead process left half-done in `parent`; does nothing while one is at work."""
    try:
        with locked(parent, fcntl.LOCK_EX | fcntl.LOCK_NB):
            _sweep(parent)
    except (BlockingIOError, FileNotFoundError):
        return


@contextmanager
def locked(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Keep out all others who lock a folder. Raises BlockingIOError with LOCK_NB when one is in."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    for aside in parent.glob(f"{_REPLACED}*"):
        target = aside.with_name(aside.name.removeprefix(_REPLACED))
        if target.exists():
            shutil.rmtree(aside)
        else:
            # The writer died between the two renames of _put: the former folder is still whole.
            aside.rename(target)
    for staging in parent.glob(f"{_STAGING}*"):
        shutil.rmtree(staging)


def _put(staging: Path, target: Path) -> None:
    aside = target.with_name(_REPLACED + target.name)
    if target.exists():
        target.rename(aside)
    staging.rename(target)
    fsync(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _flush(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            fsync(Path(root, name))
        fsync(Path(root))
