"""What sweeps and curricula have in common as objects of Python."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from ..client.client import Client
from .job import Job, status_of

_POLL_S = 0.5


class Group(ABC):
    """Jobs with one id. All values are read when they are asked for; nothing is cached."""

    _ended: ClassVar[tuple[str, ...]] = ("finished", "failed", "stopped", "canceled")

    def __init__(self, client: Client, group_id: str) -> None:
        self._client = client
        self.id = group_id

    @abstractmethod
    def info(self) -> dict[str, Any]:
        """Return all that is known of it."""

    @property
    def status(self) -> str:
        """`queued`, `started`, `paused`, `finished`, `failed`, …"""
        return status_of(self.info())

    def jobs(self) -> list[Job]:
        """Return its jobs, in order."""
        return [Job(self._client, job_id) for job_id in self._client.group_members(self.id)]

    def wait(self, *, timeout_s: float | None = None) -> str:
        """Wait until it has ended; return its status. Raises TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (status := self.status) not in self._ended:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} has not ended within {timeout_s:g} s")
            time.sleep(_POLL_S)
        return status

    def cancel(self) -> str:
        """Cancel all its jobs."""
        return self._client.cancel(self.id)

    def kill(self) -> str:
        """Stop all its jobs now; work since their last checkpoints is lost."""
        return self._client.kill(self.id)

    def pause(self, *, release: bool = False) -> str:
        """Hold its running job after the step, and put the waiting ones away."""
        return self._client.pause(self.id, release=release)

    def unpause(self) -> str:
        """Continue its paused jobs."""
        return self._client.unpause(self.id)

    def resume(self) -> str:
        """Queue its jobs again that failed or were stopped."""
        return self._client.resume(self.id)

    def __repr__(self) -> str:
        return f"<warmd {self.id.partition('-')[0]} {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)
