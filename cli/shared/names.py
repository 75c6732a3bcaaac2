"""Display names of jobs in tables, legends and headings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

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
