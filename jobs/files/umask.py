"""The umask: processes of the daemon create files for their owner only, those of users aside.

Files of users are those whose path an option names, and those that user code creates: they get the
umask with which the daemon was started.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "_WARMD_UMASK"  # the user's umask, for all processes of a daemon
_PRIVATE = 0o077


def restrict() -> None:
    """Let this process, and those that it starts, create files for their owner only."""
    os.environ[_VARIABLE] = f"{os.umask(_PRIVATE):03o}"


def of_user() -> int:
    """Return the umask for files of users: the daemon's at its start, or this process's."""
    known = os.environ.get(_VARIABLE)
    if known is not None:
        return int(known, 8)
    current = os.umask(_PRIVATE)  # it cannot be read without being set
    os.umask(current)
    return current


def file_mode() -> int:
    """Return the mode of a new file of a user."""
    return 0o666 & ~of_user()


@contextmanager
def users() -> Iterator[None]:
    """Run user code in this block: what it creates gets the user's umask."""
    before = os.umask(of_user())
    try:
        yield
    finally:
        os.umask(before)


def for_user(path: str, flags: int) -> int:
    """An opener for `open` that creates a file of a user; an existing one keeps its mode."""
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        return os.open(path, flags | os.O_CLOEXEC, 0o600)
    set_mode(descriptor, file_mode())
    return descriptor


def set_mode(descriptor: int, mode: int) -> None:
    """Set the mode of an open file, where the file system has modes."""
    with contextlib.suppress(PermissionError):
        os.fchmod(descriptor, mode)
