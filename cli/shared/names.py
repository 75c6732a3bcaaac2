"""Display names of jobs in tables, legends and headings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from ...jobs.errors import NotFound
from ...jobs.ids import is_job_id
from ..view import render

if TYPE_CHECKING:
    from ...daemon.client.client import Client


def names_of(client: Client, ids: Iterable[str]) -> dict[str, str]:
    """Return the display name of each job by its id.

    It is the job's name, followed by the id where several of the jobs have that name; the id for a
    job without a name.
    """
    found = {job_id: client.jobs.labels(job_id).name for job_id in ids}
    times = Counter(found.values())
    names = {}
    for job_id, name in found.items():
        if name is None:
            names[job_id] = job_id
        else:
            shown = render.one_line(name)
            names[job_id] = shown if times[name] == 1 else f"{shown} {job_id}"
    return names


def model_names(client: Client, models: Iterable[str | None]) -> dict[str | None, str]:
    """Return the display name of each model: JOB and JOB@STEP by the name of the job."""
    every = set(models)
    jobs = {job for model in every if model and is_job_id(job := model.partition("@")[0])}
    there = []
    for job_id in jobs:
        with suppress(NotFound):  # it was removed
            client.rundir(job_id)
            there.append(job_id)
    names = names_of(client, there)
    shown = {}
    for model in every:
        job, at, step = (model or "").partition("@")
        shown[model] = f"{names.get(job, job)}{at}{step}" or render.NOTHING
    return shown
