"""The context of each rank of a job of several processes: rank 0 writes, the others compute.

Stop and pause requests are for rank 0 alone. When it stops or waits at the end of a step, the
others wait for it in their next exchange: they hold nothing that it must save.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...jobs.context import Checkpoints, Context, Never, Ranks, Save


def context_of_rank(context: Context, ranks: Ranks) -> Context:
    """Return the context of this rank, given that of the job."""
    checkpoints = _SharedCheckpoints(context.checkpoints, ranks, context.run_dir)
    if ranks.rank == 0:
        return replace(context, checkpoints=checkpoints, ranks=ranks)
    return replace(
        context,
        checkpoints=checkpoints,
        ranks=ranks,
        emit=_emit_nothing,
        working=_report_nothing,
        stop=Never(),
        pause=Never(),
        stop_at=None,
    )


class _SharedCheckpoints:
    """The checkpoints of a job, of which rank 0 finds the latest for all."""

    def __init__(self, checkpoints: Checkpoints, ranks: Ranks, run_dir: Path) -> None:
        self._checkpoints = checkpoints
        self._ranks = ranks
        self._run_dir = run_dir

    def latest(self) -> Path | None:
        found = self._ranks.from_first(self._latest)
        return None if found is None else self._run_dir / found

    def _latest(self) -> str | None:
        # Relative: the run directory has another path on other machines.
        found = self._checkpoints.latest()
        return None if found is None else os.path.relpath(found, self._run_dir)

    def save(
        self,
        step: int,
        prepare: Callable[[Any], Callable[[], None]],
        *,
        about: Mapping[str, Any],
    ) -> Save:
        return self._checkpoints.save(step, prepare, about=about)

    def about(self, checkpoint: Path) -> dict[str, Any]:
        return self._checkpoints.about(checkpoint)


def _emit_nothing(type: str, /, *, step: int | None = None, **fields: Any) -> None:
    """Rank 0 emits the events of all."""


def _report_nothing(activity: object) -> None:
    """The watchdog watches rank 0."""
