"""Common base of sweeps and curricula in the Python interface."""

from __future__ import annotations

import time

from ..queue.jobs import ENDED
from .job import Job
from .steered import Steered

_POLL_S = 0.5


class Group(Steered):
    """Jobs with one id."""

    def jobs(self) -> list[Job]:
        """Return the jobs of the group, in order."""
        return [Job(self._client, job_id) for job_id in self._client.groups.members(self.id)]

    def wait(self, *, timeout_s: float | None = None) -> str:
        """Wait until it has ended; return its status. Raises TimeoutError."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (status := self.status) not in ENDED:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.id} has not ended within {timeout_s:g} s")
            time.sleep(_POLL_S)
        return status

    def resume(self) -> str:
        """Queue those of its jobs again that failed or were stopped."""
        return self._client.jobs.resume(self.id)
