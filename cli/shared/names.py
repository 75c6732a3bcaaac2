"""Names of jobs where several are shown beside each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..view import render

if TYPE_CHECKING:
    from ...daemon.client.client import Client


def names_of(client: Client, ids: Iterable[str]) -> dict[str, str]:
    """Return what jobs are called, by id: the name, with the id if others have it; else the id."""
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
