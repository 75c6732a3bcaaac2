"""Saving concurrently with the training, in a thread that mostly waits for the disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...jobs.files.atomic import naming
from ...jobs.files.shortage import lacks_space


@dataclass(frozen=True, kw_only=True)
class Saved:
    """How a save ended (jobs.context.Saved)."""

    path: Path
    seconds: float
    size_bytes: int = 0
    error: str | None = None  # why there is no new checkpoint
    lacked_space: bool = False


class Save:
    """A save in flight (jobs.context.Save)."""

    def __init__(self, step: int, path: Path, write: Callable[[], int]) -> None:
        """Start `write`, which creates `path` and returns its size in bytes."""
        self.step = step
        self._path = path
        self._saved: Saved | None = None
        # Only the thread refers to the data that it writes: for a training on a GPU, a copy of all
        # state.
        self._thread = threading.Thread(
            target=self._run, args=(write,), name=f"save of step {step}"
        )
        self._thread.start()

    def outcome(self, *, patience_s: float | None = 0) -> Saved | None:
        """Return how the save ended; None if it has not ended in time (no time: wait)."""
        if self._saved is None:
            self._thread.join(patience_s)
        return self._saved

    def _run(self, write: Callable[[], int]) -> None:
        begun = time.monotonic()
        size_bytes, error, lacked_space = 0, None, False
        try:
            with naming(self._path):
                size_bytes = write()
        except Exception as problem:  # mostly a full disk; the job decides how to react
            root = _root(problem)
            error = f"{type(root).__name__}: {root}"
            lacked_space = lacks_space(problem)
        self._saved = Saved(
            path=self._path,
            seconds=time.monotonic() - begun,
            size_bytes=size_bytes,
            error=error,
            lacked_space=lacked_space,
        )


def _root(error: BaseException) -> BaseException:
    """Return the root cause: torch.save raises another error on top of the disk's."""
    while error.__context__ is not None:
        error = error.__context__
    return error
