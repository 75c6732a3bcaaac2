"""A sweep, as an object of Python and of notebooks."""

from __future__ import annotations

import time
from typing import Any

from ..client.client import Client
from .job import Job, status_of

_POLL_S = 0.5
_ENDED = ("finished", "failed", "stopped", "canceled")


class Sweep:
    """The jobs of a sweep. All values are read when they are asked for; nothing is cached."""

    def __init__(self, client: Client, sweep_id: str) -> None:
        self._client = client
        self.id = sweep_id

    @property
    def status(self) -> str:
        """`queued`, `started`, `paused`, `finished`, `failed`, …"""
        return status_of(self.info())

    def info(self) -> dict[str, Any]:
        """Return what `warmd sweep show --json` prints: `points` with `mean`, `low`, `high`, …"""
        return self._client.sweep(self.id)

    def jobs(self) -> list[Job]:
        """Return its jobs, by point and seed."""
        return [Job(self._client, job_id) for job_id in self._client.sweep_members(self.id)]

    def best(self) -> dict[str, Any] | None:
        """Return the best point: `values`, `mean`, `low`, `high`, `jobs`; None before any score."""
        info = self.info()
        found: dict[str, Any] | None = (
            None if info["best"] is None else info["points"][info["best"]]
        )
        return found

    def table(self) -> dict[str, list[Any]]:
        """Return the points as columns: their values, `step`, `n`, `mean`, `low` and `high`."""
        points = self.info()["points"]
        names = list(dict.fromkeys(name for point in points for name in point["values"]))
        columns = {name: [point["values"].get(name) for point in points] for name in names}
        scores = ("step", "n", "mean", "low", "high")
        return columns | {name: [point[name] for point in points] for name in scores}

    def wait(self, *, timeout_s: float | None = None) -> str:
        """Wait until all its jobs have ended; return its status. Raises TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (status := self.status) not in _ENDED:
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
        return f"<warmd sweep {self.id}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sweep) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)
