"""Common base of jobs, sweeps and curricula in the Python interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from ..client.client import Client
from ..lifecycle.statuses import shown


class Steered(ABC):
    """A job or a group of jobs. All values are read on access; nothing is cached."""

    def __init__(self, client: Client, id: str) -> None:
        self._client = client
        self.id = id

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return all known fields."""

    @property
    def status(self) -> str:
        """`queued`, `started`, `paused`, `finished`, `failed`, …; docs/jobs.md has all."""
        return shown(self.info())

    def cancel(self) -> str:
        """Dequeue waiting jobs ("canceled"), save and stop running ones ("stopping")."""
        return self._client.jobs.cancel(self.id)

    def kill(self) -> str:
        """Stop running jobs now ("killing"); work since their last checkpoints is lost."""
        return self._client.jobs.kill(self.id)

    def pause(self, *, release: bool = False) -> str:
        """Pause running jobs after their step, and take waiting ones out of their queue.

        `release`: save running jobs, and free their memory.
        """
        return self._client.jobs.pause(self.id, release=release)

    def unpause(self) -> str:
        """Continue paused jobs."""
        return self._client.jobs.unpause(self.id)

    def __repr__(self) -> str:
        return f"<warmd {type(self).__name__.lower()} {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)
