"""Progress of a job while Python waits for it: HTML in a notebook, a line on stderr elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, Protocol

from ...configs.units import format_duration
from ..runs.estimate import Estimate

_INTERVAL_S = 0.5  # between two updates of the display


def share_of(progress: Estimate) -> float | None:
    """The part that is done, from 0 to 1; None: unknown."""
    if progress.steps_total:
        return min(progress.step / progress.steps_total, 1.0)
    if progress.rows_total:
        return min((progress.rows_done or 0) / progress.rows_total, 1.0)
    return None


def words_of(progress: Estimate, now: float) -> str:
    """Return phase, step, metrics and ETA in one line."""
    parts = [progress.phase]
    if progress.steps_total:
        parts.append(f"step {progress.step}/{progress.steps_total}")
    elif progress.rows_total:
        parts.append(f"{progress.rows_done or 0}/{progress.rows_total} {progress.unit}")
    parts += [f"{name} {value:.4g}" for name, value in progress.metrics.items()]
    eta_s = progress.eta_s(now)
    if eta_s is not None and progress.phase == "running":
        parts.append(f"ETA {format_duration(eta_s)}")
    return "  ".join(parts)


class Shown(Protocol):
    """The part of a job that a display uses; a notebook also uses its HTML."""

    id: str

    def now(self) -> float:
        """The time in unix seconds by the clock of the job's events."""


class Display(Protocol):
    """Where progress is shown."""

    def update(self, event: Mapping[str, Any] | None) -> None:
        """Process an event; None: no event arrived for a while."""


class _Nothing:
    def update(self, event: Mapping[str, Any] | None) -> None:
        """Show nothing."""


class _Line:
    """A line on stderr that overwrites itself."""

    def __init__(self, job: Shown) -> None:
        self._job = job
        self._progress = Estimate()
        self._drawn_at = 0.0

    def update(self, event: Mapping[str, Any] | None) -> None:
        if event is not None:
            self._progress.update(event)
        if time.monotonic() - self._drawn_at >= _INTERVAL_S:
            self.draw()

    def draw(self) -> None:
        self._drawn_at = time.monotonic()
        text = f"{self._job.id}  {words_of(self._progress, self._job.now())}"
        sys.stderr.write(f"\r{text}\x1b[K" if sys.stderr.isatty() else f"{text}\n")
        sys.stderr.flush()


class _Cell:
    """The output of a notebook's cell, which shows the job's HTML."""

    def __init__(self, job: Shown) -> None:
        self._job = job
        self._handle = import_module("IPython.display").display(job, display_id=True)
        self._drawn_at = time.monotonic()

    def update(self, event: Mapping[str, Any] | None) -> None:
        if time.monotonic() - self._drawn_at >= _INTERVAL_S:
            self.draw()

    def draw(self) -> None:
        self._drawn_at = time.monotonic()
        self._handle.update(self._job)


@contextmanager
def show_progress(job: Shown, wanted: bool | None) -> Iterator[Display]:
    """Give the display for a job. `wanted` None: only in a notebook."""
    if wanted is False or (wanted is None and not _is_notebook()):
        yield _Nothing()
        return
    display = _Cell(job) if _is_notebook() else _Line(job)
    try:
        yield display
    finally:
        display.draw()
        if isinstance(display, _Line) and sys.stderr.isatty():
            sys.stderr.write("\n")


def _is_notebook() -> bool:
    """Whether this is a notebook's kernel, which shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
