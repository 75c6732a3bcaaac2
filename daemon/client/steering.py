"""Requests to jobs that wait or run: cancel, kill, pause, continue, move in the queue."""

from __future__ import annotations

from functools import partial

from ...configs.queues import INFER
from ...jobs.errors import Conflict
from ..queue.jobs import ENDED
from ..runs import asked
from ..runs.order import Order
from ..runs.rundir import RunDir
from .connection import ClientConnection, needs_redis


class Steering(ClientConnection):
    """Stops, pauses, continues and reorders jobs."""

    @needs_redis
    def cancel(self, job_id: str) -> str:
        """Cancel a waiting job ("canceled"), or let a running one save and stop ("stopping")."""
        return self._end(job_id, "cancel", "stopping")

    @needs_redis
    def kill(self, job_id: str) -> str:
        """Cancel a waiting job ("canceled"), or kill a running one ("killing")."""
        return self._end(job_id, "kill", "killing")

    def cancel_if_pending(self, job_id: str) -> bool:
        """Cancel a job unless it has ended; return whether it had not."""
        try:
            self.cancel(job_id)
        except Conflict:
            return False
        return True

    def _end(self, job_id: str, how: str, reply: str) -> str:
        job = self.fetch(job_id)
        while True:
            # The job may start or end between these calls.
            if self.store.cancel_waiting(job):
                self._note(job_id, asked.CANCELED)
                return "canceled"
            if self.store.request_stop(job, how):
                self._note(job_id, asked.CANCELED)
                return reply
            status = job.get_status()
            if status in ENDED:
                raise Conflict(f"job: {job_id} is {status.value} already")

    @needs_redis
    def pause(self, job_id: str, *, release: bool = False) -> str:
        """Pause a running job at the end of its step ("pausing"), or park a waiting one ("paused").

        `release`: a running job saves, ends and is parked too. Only `unpause` continues a paused
        job. Raises Conflict.
        """
        job = self.fetch(job_id)
        how = "release" if release else "hold"
        while True:
            status = job.get_status()
            if status in ENDED:
                raise Conflict(f"job: {job_id} is {status.value}: nothing to pause")
            if self.store.pause_of(job) in (how, "release"):
                raise Conflict(f"job: {job_id} is paused already: `warmd unpause` continues it")
            if self.store.pause_waiting(job):
                self._note(job_id, asked.PAUSED)
                return "paused"
            if job.origin == INFER and not release:
                raise Conflict(
                    f"job: {job_id} is generating, and cannot be held: cancel it instead"
                )
            if self.store.request_pause(job, how):
                self._note(job_id, asked.PAUSED)
                return "pausing"

    @needs_redis
    def unpause(self, job_id: str) -> str:
        """Continue a held job ("continuing"), or return a parked one to the front of its queue.

        Returns the status of a job that waits again. Raises Conflict.
        """
        job = self.fetch(job_id)
        while True:
            if self.store.pause_of(job) is None:
                raise Conflict(f"job: {job_id} is not paused")
            self._note(job_id, asked.CONTINUED, front=True)
            if self.store.withdraw_pause(job):
                return "continuing"
            status = self.store.unpause(job)
            if status is not None:
                return status.value

    def _note(self, job_id: str, state: str, *, front: bool = False) -> None:
        asked.note(RunDir(self.home.runs / job_id), state, front=front)

    @needs_redis
    def move(self, job_id: str, position: int) -> int:
        """Move a queued job to a position of its queue, 1 for the next; return its position.

        A position beyond the end means the last one. Raises Conflict for a job that is not queued.
        """
        job = self.fetch(job_id)
        found = self.store.move(job, position)
        if found is None:
            raise Conflict(f"job: {job_id} is {job.get_status().value}: it is in no queue")
        Order(self.home.order).note(job.origin, partial(self.store.order, job.origin))
        return found
