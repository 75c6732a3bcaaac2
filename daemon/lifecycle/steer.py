"""Requests to jobs that wait or run: cancel, kill, pause, continue, move in the queue.

Each is noted in the run directory, so that a Redis that loses its latest writes gets it again.
"""

from __future__ import annotations

from functools import partial

from ...configs.queues import INFER
from ...jobs.errors import Conflict
from ..queue.jobs import ENDED
from ..runs import asked
from ..runs.order import Order
from .places import Places


def cancel(places: Places, job_id: str) -> str:
    """Cancel a waiting job ("canceled"), or let a running one save and stop ("stopping")."""
    return _end(places, job_id, "cancel", "stopping")


def kill(places: Places, job_id: str) -> str:
    """Cancel a waiting job ("canceled"), or kill a running one ("killing")."""
    return _end(places, job_id, "kill", "killing")


def _end(places: Places, job_id: str, how: str, reply: str) -> str:
    job = places.fetch(job_id)
    while True:
        # The job may start or end between these calls.
        if places.store.cancel_waiting(job):
            _note(places, job_id, asked.CANCELED)
            return "canceled"
        if places.store.request_stop(job, how):
            _note(places, job_id, asked.CANCELED)
            return reply
        status = job.get_status()
        if status in ENDED:
            raise Conflict(f"job: {job_id} is {status.value} already")


def pause(places: Places, job_id: str, *, release: bool = False) -> str:
    """Pause a running job at the end of its step ("pausing"), or park a waiting one ("paused").

    `release`: a running job saves, ends and is parked too. Only `unpause` continues a paused
    job. Raises Conflict.
    """
    job = places.fetch(job_id)
    how = "release" if release else "hold"
    while True:
        status = job.get_status()
        if status in ENDED:
            raise Conflict(f"job: {job_id} is {status.value}: nothing to pause")
        if places.store.pause_of(job) in (how, "release"):
            raise Conflict(f"job: {job_id} is paused already: `warmd resume` continues it")
        if places.store.pause_waiting(job):
            _note(places, job_id, asked.PAUSED)
            return "paused"
        if job.origin == INFER and not release:
            raise Conflict(f"job: {job_id} is generating, and cannot be held: cancel it instead")
        if places.store.request_pause(job, how):
            _note(places, job_id, asked.PAUSED)
            return "pausing"


def unpause(places: Places, job_id: str) -> str:
    """Continue a held job ("continuing"), or return a parked one to the front of its queue.

    Returns the status of a job that waits again. Raises Conflict.
    """
    job = places.fetch(job_id)
    while True:
        if places.store.pause_of(job) is None:
            raise Conflict(f"job: {job_id} is not paused")
        _note(places, job_id, asked.CONTINUED, front=True)
        if places.store.withdraw_pause(job):
            return "continuing"
        status = places.store.unpause(job)
        if status is not None:
            return status.value


def _note(places: Places, job_id: str, state: str, *, front: bool = False) -> None:
    asked.note(places.rundir(job_id), state, front=front)


def move(places: Places, job_id: str, position: int) -> int:
    """Move a queued job to a position of its queue, 1 for the next; return its position.

    A position beyond the end means the last one. Raises Conflict for a job that is not queued.
    """
    job = places.fetch(job_id)
    found = places.store.move(job, position)
    if found is None:
        raise Conflict(f"job: {job_id} is {job.get_status().value}: it is in no queue")
    Order(places.home.order).note(job.origin, partial(places.store.order, job.origin))
    return found
