"""A curriculum as a Python object, with a view for notebooks."""

from __future__ import annotations

from typing import Any

from .group import Group
from .job import Job

_COLUMNS = ("stage", "attempt", "job", "status", "step", "decision")
_COMPARED = ("metric", "difference", "low", "high", "p")


class Curriculum(Group):
    """A training in stages, and the evaluations at its gates."""

    def info(self) -> dict[str, Any]:
        """Return what `warmd show --json` prints: `attempts` with `decision`, …"""
        return self._client.groups.curriculum(self.id)

    @property
    def status(self) -> str:
        """`started`, `paused`, `finished`, `failed` or `canceled`."""
        return str(self.info()["status"])

    def model(self) -> Job | None:
        """Return the job whose model is the latest that passed a gate."""
        job_id = self.info()["model"]
        return None if job_id is None else Job(self._client, job_id)

    def table(self) -> dict[str, list[Any]]:
        """Return the attempts as columns: `stage`, `job`, `decision`, and the comparison's
        `metric`, `difference`, `low`, `high` and `p`."""
        attempts = self.info()["attempts"]
        columns = {name: [attempt[name] for attempt in attempts] for name in _COLUMNS}
        comparisons = [attempt["comparison"] or {} for attempt in attempts]
        return columns | {name: [one.get(name) for one in comparisons] for name in _COMPARED}
