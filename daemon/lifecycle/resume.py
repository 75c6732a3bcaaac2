"""Queueing an ended job again."""

from __future__ import annotations

from collections.abc import Mapping

from ..queue.jobs import Job
from ..runs import asked
from .places import Places


def queue_again(
    places: Places, job: Job, *, front: bool = False, needs: Mapping[str, str] | None = None
) -> bool:
    """Note the request in the run directory, publish it and queue the job; False if not ended.

    `needs`: the labels that its node must have (`adopt.needs_of`); None: those of before.
    """
    asked.note(places.rundir(job.id), asked.RESUMED, front=front)
    places.publish(job.id)
    return places.store.enqueue_again(job, front=front, needs=needs)
