"""Saving beside the training: a forked copy of the process writes what it held at the fork.

The fork takes milliseconds. What the training then overwrites is copied by the kernel, page by
page, as it is overwritten; the copy of the process sees the old pages until it ends. It computes
only when a core has nothing else to do.
"""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from .leash import end_with_parent


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save ended (jobs.context.Saved)."""

    path: Path
    seconds: float
    size_bytes: int = 0
    error: str | None = None  # why there is no new checkpoint


class Save:
    """A save in flight (jobs.context.Save)."""

    def __init__(self, step: int, path: Path, write: Callable[[], int]) -> None:
        """Fork a child whose `write` makes `path` and returns its bytes."""
        self.step = step
        self._path = path
        self._began = time.monotonic()
        self._pipe, theirs = os.pipe()
        parent = os.getpid()
        with warnings.catch_warnings():
            # Of threads that hold a lock at the fork. Those of a horse hold none that a child asks
            # for: one waits for its worker, those of OpenMP sleep, and the child starts no others.
            warnings.filterwarnings(
                "ignore", "This process .* is multi-threaded", DeprecationWarning
            )
            self._pid = os.fork()
        if self._pid == 0:
            _write_and_exit(parent, theirs, write)
        os.close(theirs)
        self._saved: Saved | None = None

    def outcome(self, *, patience_s: float | None = 0) -> Saved | None:
        """Return how the save ended, or None when it has not so soon; with None, wait for it."""
        if self._saved is None:
            if patience_s != 0:
                self._hurry()
            if select.select([self._pipe], [], [], patience_s)[0]:
                self._saved = self._collect()
        return self._saved

    def _hurry(self) -> None:
        # Somebody waits for it: let it compete for the cores.
        if hasattr(os, "sched_setscheduler"):
            # It may have ended, or the machine may not allow it: then it takes longer.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.sched_setscheduler(self._pid, os.SCHED_OTHER, os.sched_param(0))

    def _collect(self) -> Saved:
        with open(self._pipe, "rb") as pipe:
            said = pipe.read()
        _, status = os.waitpid(self._pid, 0)
        seconds = time.monotonic() - self._began
        if said:
            return Saved(path=self._path, seconds=seconds, **orjson.loads(said))
        code = os.waitstatus_to_exitcode(status)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        error = f"the process that wrote it ended: {how}, perhaps out of memory"
        return Saved(path=self._path, seconds=seconds, error=error)


def _write_and_exit(parent: int, pipe: int, write: Callable[[], int]) -> None:
    """Be the child. Never returns: whatever lies below on the stack is the parent's."""
    status = 1
    try:
        end_with_parent(parent)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is for the parent to stop
        gc.disable()  # a collection would touch, and so copy, every page with an object
        _be_idle()
        try:
            said: dict[str, Any] = {"size_bytes": write()}
        except Exception as error:  # a full disk, mostly; the parent decides what it means
            said = {"error": f"{type(error).__name__}: {error}"}
        os.write(pipe, orjson.dumps(said))
        status = 0
    finally:
        os._exit(status)


def _be_idle() -> None:
    if hasattr(os, "sched_setscheduler"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)
