"""Atomic writes: files and folders appear on disk complete or not at all, also after a crash.

A folder is written under a hidden name next to its target, flushed, and renamed. The writer holds a
lock (flock), which the kernel releases when the process dies: this distinguishes leftovers from
work in progress. Writers of different folders exclude each other only during the renames, by a lock
for the parent folder.

Locks are on hidden files, never on folders: NFS applies flock between machines only for files that
are open for writing. A lock file is removed by its holder; whoever waited for it notices that the
file has gone, and opens the next one.

A lock is released explicitly. Closing its descriptor is not enough: it releases the lock only when
the last copy is closed, and a process that user code forked meanwhile has a copy.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from .shortage import lacks_space
from .umask import set_mode

_NOW = fcntl.LOCK_EX | fcntl.LOCK_NB
_WAIT_S = 0.05  # between two tries to get a lock, where waiting for it can be interrupted
_STAGING = ".staging-"  # being filled; never valid
_REPLACED = ".replaced-"  # prefix of the old folder while it is replaced
LOCK = ".lock"  # of a folder
_WRITING = ".lock-"  # prefix of the lock of a folder that is being filled


def write_atomic(path: Path, content: bytes, *, mode: int = 0o600) -> None:
    """Replace the file `path` atomically. Raises OSError that names it."""
    with naming(path), whole_file(path, mode=mode) as file:
        file.write(content)


@contextmanager
def whole_file(path: Path, *, mode: int = 0o600) -> Iterator[BinaryIO]:
    """Yield an empty file to write; leaving the block renames it to `path`, replacing that.

    `mode`: of the file, whatever the umask is.

    An exception in the block, or while flushing (a full disk), leaves `path` as it was. Concurrent
    writers wait for each other; leftovers of a dead writer are overwritten.
    """
    temporary = _temporary(path)
    lock = _open_locked(lambda: _create(temporary), temporary)
    with _released(lock), open(lock.fileno(), "wb", closefd=False) as file:
        try:
            file.truncate()
            if mode != 0o600:
                set_mode(lock.fileno(), mode)
            yield file
            with naming(path):
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    fsync(path.parent)


def remove_unfinished(path: Path) -> None:
    """Remove what a dead writer of a whole file has left; there must be no other writer."""
    _temporary(path).unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _create(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)


def make_folder(path: Path) -> None:
    """Create a folder, and those above it that are missing, for their owner only."""
    for folder in (*reversed(path.parents), path):
        if folder == path or not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


@contextmanager
def _released(lock: FileIO) -> Iterator[None]:
    """Release a lock at the end of the block, and close its file.

    A process that was forked in the block only closes its copy.
    """
    owner = os.getpid()
    try:
        yield
    finally:
        try:
            if os.getpid() == owner:
                fcntl.flock(lock.fileno(), fcntl.LOCK_UN)
        finally:
            lock.close()


def _open_locked(
    open_it: Callable[[], int],
    path: Path,
    how: int = fcntl.LOCK_EX,
    *,
    while_waiting: Callable[[], None] | None = None,
) -> FileIO:
    """Return `path`, open and locked.

    `while_waiting` is called periodically; an exception of it ends the wait.

    Not a descriptor: a file is closed with the last reference to it, so that no interrupt leaves a
    lock behind. A process that continues after one, such as a notebook, would wait for itself.
    """
    while True:
        lock = FileIO(open_it(), "r+")
        try:
            _lock(lock.fileno(), how, while_waiting)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock.fileno()), path.stat()):
                    return lock
        except BaseException:
            lock.close()
            raise
        with _released(lock):  # its previous holder has renamed or removed it
            pass


def _lock(descriptor: int, how: int, while_waiting: Callable[[], None] | None) -> None:
    if while_waiting is None:
        fcntl.flock(descriptor, how)
        return
    while True:
        try:
            return fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except BlockingIOError:
            while_waiting()
            time.sleep(_WAIT_S)


def release(descriptor: int) -> None:
    """Release the lock on an open file, whatever process has a copy of it, and close it."""
    with _released(FileIO(descriptor, "r+")):
        pass


def fsync(path: Path) -> None:
    """Make a file's content, or the names in a folder, survive a power failure."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the file's path to an OSError of the block that has none: descriptors have no names."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def whole_folder(
    target: Path, *, while_waiting: Callable[[], None] | None = None
) -> Iterator[Path]:
    """Yield an empty folder to fill; leaving the block renames it to `target`, replacing that.

    An exception in the block, or while flushing (a full disk), leaves `target` as it was.
    Concurrent writers of the same folder wait for each other; `while_waiting` is called
    periodically by the waiting one and may raise to end the wait.
    """
    make_folder(target.parent)
    recover(target.parent)
    staging = target.with_name(_STAGING + target.name)
    with _held(_writing(target), while_waiting=while_waiting):
        try:
            staging.mkdir(mode=0o700, exist_ok=True)
            _empty(staging)
            yield staging
            _fsync_tree(staging)
            with locked(target.parent):
                _replace(staging, target)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yield a new folder in `parent` that is removed at the end of the block.

    After a kill, `recover` removes it, also that of the next scratch folder there.
    """
    make_folder(parent)
    recover(parent)
    target = parent / f"scratch-{secrets.token_hex(8)}"
    staging = target.with_name(_STAGING + target.name)
    with _held(_writing(target)):
        try:
            staging.mkdir(mode=0o700)
            yield staging
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _writing(target: Path) -> Path:
    """Return the lock file of the writer of a folder."""
    return target.with_name(_WRITING + target.name)


def recover(parent: Path) -> None:
    """Undo incomplete writes of dead processes in `parent`; live writers are not affected."""
    with contextlib.suppress(BlockingIOError, FileNotFoundError), locked(parent, _NOW):
        for aside in parent.glob(f"{_REPLACED}*"):
            _finish_replacement(aside)
        left = {path.name.removeprefix(_STAGING) for path in parent.glob(f"{_STAGING}*")}
        left |= {path.name.removeprefix(_WRITING) for path in parent.glob(f"{_WRITING}*")}
        for name in left:
            with contextlib.suppress(BlockingIOError), _held(_writing(parent / name), _NOW):
                shutil.rmtree(parent / (_STAGING + name), ignore_errors=True)


@contextmanager
def locked(folder: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold the lock of a folder. Raises BlockingIOError with LOCK_NB when it is taken.

    Where the disk has no room for the lock file the folder itself is locked, which holds on this
    machine: a removal that makes room must be possible.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_held(folder / LOCK, how))
        except OSError as error:
            if not lacks_space(error):
                raise
            stack.enter_context(_held_folder(folder, how))
        yield


@contextmanager
def _held_folder(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    owner = os.getpid()
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        if os.getpid() == owner:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


@contextmanager
def _held(
    path: Path, how: int = fcntl.LOCK_EX, *, while_waiting: Callable[[], None] | None = None
) -> Iterator[None]:
    """Hold a lock file. Raises BlockingIOError with LOCK_NB when it is taken."""
    lock = _open_locked(
        lambda: os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600),
        path,
        how,
        while_waiting=while_waiting,
    )
    owner = os.getpid()
    with _released(lock):
        try:
            yield
        finally:
            # Others may also hold a shared lock; a process forked in the block holds none.
            if how & fcntl.LOCK_EX and os.getpid() == owner:
                with contextlib.suppress(FileNotFoundError):  # with its folder
                    path.unlink()


def _finish_replacement(aside: Path) -> None:
    """Undo, or complete, a replacement whose writer died before its end."""
    target = aside.with_name(aside.name.removeprefix(_REPLACED))
    if target.exists():
        shutil.rmtree(aside)
    else:
        # The writer died between the two renames of _replace: `aside` is the complete old folder.
        aside.rename(target)


def _empty(folder: Path) -> None:
    """Remove the files that a dead writer left in a folder."""
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _replace(staging: Path, target: Path) -> None:
    aside = target.with_name(_REPLACED + target.name)
    if aside.exists():
        _finish_replacement(aside)
    if target.exists():
        target.rename(aside)
    staging.rename(target)
    fsync(target.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _fsync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            fsync(Path(root, name))
        fsync(Path(root))
