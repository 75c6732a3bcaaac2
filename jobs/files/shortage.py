"""Waiting for what a machine lacks for a while: space, inodes, quota, threads, descriptors.

An operation that meets a shortage is repeated, with growing pauses, until it succeeds or its job is
to stop. Other errors, such as EIO, are raised at once.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ..errors import Unavailable

T = TypeVar("T")

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 5.0
_NO_THREAD = "can't start new thread"  # Python's RuntimeError
# Libraries in Rust (safetensors, tokenizers) report errors of the system in words.
_NUMBER_IN_WORDS = re.compile(r"\(os error (\d+)\)")


@dataclass(frozen=True)
class Shortage:
    """What is missing: `space in FOLDER`, `a free thread or process`, `a free file descriptor`."""

    what: str
    reason: str  # in the words of the system


def shortage(error: BaseException, folder: Path | None = None) -> Shortage | None:
    """Return the shortage that caused an error; None for any other cause.

    `folder`: the folder that was written to, for errors that do not name a file.
    """
    for cause in _causes(error):
        if isinstance(cause, Lacking):
            return cause.lacking
        number = _number(cause)
        if number in _NO_SPACE:
            named = cause.filename if isinstance(cause, OSError) else None
            place = folder
            if isinstance(named, str | bytes | os.PathLike):
                place = Path(os.fsdecode(named)).parent
            where = "on the disk" if place is None else f"in {place}"
            return Shortage(f"space {where}", os.strerror(number))
        if number in _NO_DESCRIPTOR:
            return Shortage("a free file descriptor (limit of open files)", os.strerror(number))
        if isinstance(cause, RuntimeError) and str(cause) == _NO_THREAD:
            return no_process(str(cause))
    return None


class Lacking(Unavailable):
    """The machine lacks something now without which a process cannot run."""

    def __init__(self, lacking: Shortage) -> None:
        super().__init__(f"the machine lacks {lacking.what}: {lacking.reason}")
        self.lacking = lacking


def of_start(error: OSError) -> Shortage | None:
    """Return the shortage because of which a process could not be started; None: another cause."""
    if error.errno in (errno.EAGAIN, errno.ENOMEM):
        return no_process(os.strerror(error.errno))
    return shortage(error)


def no_process(reason: str) -> Shortage:
    """Return the shortage of a machine that refuses to start a thread or a process."""
    return Shortage("a free thread or process (limit of processes)", reason)


def can_start_threads(number: int) -> bool:
    """Return whether the machine can start this many threads now, by starting them."""
    over = threading.Event()
    started: list[threading.Thread] = []
    try:
        for _ in range(number):
            thread = threading.Thread(target=over.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        return False
    finally:
        over.set()
        for thread in started:
            thread.join()
    return True


def lacks_space(error: BaseException) -> bool:
    """Whether an error was caused by a full disk or an exhausted quota."""
    return any(_number(cause) in _NO_SPACE for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and what it was raised from: libraries raise others on top of the disk's."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or cause.__context__


def _number(error: BaseException) -> int:
    if isinstance(error, OSError):
        return error.errno or 0
    found = _NUMBER_IN_WORDS.search(str(error))
    return 0 if found is None else int(found[1])


class Patience:
    """Repeats writes that met a full disk. Used from several threads."""

    def __init__(
        self,
        stop: threading.Event,
        *,
        on_change: Callable[[Shortage | None], None] = lambda now: None,
    ) -> None:
        """`stop`: a write that cannot succeed is no longer repeated once this is set.

        `on_change` receives the shortage when a wait begins, and None when all waits are over.
        """
        self._stop = stop
        self._on_change = on_change
        self._lock = threading.Lock()
        self._waiting: list[Shortage] = []  # one for each waiting thread
        self._since = 0.0  # when the first of them began
        self._waited_s = 0.0  # before

    @property
    def waited_s(self) -> float:
        """How long at least one thread has waited so far."""
        with self._lock:
            return self._waited_s + (time.monotonic() - self._since if self._waiting else 0.0)

    def write(self, write: Callable[[], T], folder: Path | None = None) -> T:
        """Return what `write` returns; call it again while the disk has no room for it.

        A failed `write` must have left nothing behind. Raises what it raised when `stop` is set.
        """
        try:
            return write()
        except Exception as error:
            lacking = shortage(error, folder) if lacks_space(error) else None
            if lacking is None or self._stop.is_set():
                raise
        self._begin(lacking)
        try:
            return self._repeat(write)
        finally:
            self._end(lacking)

    def _repeat(self, write: Callable[[], T]) -> T:
        pause_s = _FIRST_PAUSE_S
        while True:
            self._stop.wait(pause_s)
            began = time.monotonic()
            try:
                return write()
            except Exception as error:
                if not lacks_space(error) or self._stop.is_set():
                    raise
            # A failed write of a large file may take long. A pause is at least as long as the write
            # before it, so that at most half of the time is spent on failed writes.
            took_s = time.monotonic() - began
            pause_s = max(min(2 * pause_s, _LONGEST_PAUSE_S), took_s)

    def _begin(self, lacking: Shortage) -> None:
        with self._lock:
            self._waiting.append(lacking)
            is_first = len(self._waiting) == 1
            if is_first:
                self._since = time.monotonic()
        if is_first:
            self._on_change(lacking)

    def _end(self, lacking: Shortage) -> None:
        with self._lock:
            self._waiting.remove(lacking)
            is_last = not self._waiting
            if is_last:
                self._waited_s += time.monotonic() - self._since
        if is_last:
            self._on_change(None)
