"""Which job a command acts on when none is named: the only candidate, never a guess."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ...jobs.errors import Conflict, NotFound
from .app import App, note

if TYPE_CHECKING:
    from ...daemon.client.client import Client
    from ...daemon.lifecycle.find import Pending

_MOST_LISTED = 10

Choice = Callable[["Pending"], bool]


def runs(job: Pending) -> bool:
    return job.status == "started"


def waits(job: Pending) -> bool:
    return job.status != "started"


def runs_unpaused(job: Pending) -> bool:
    return runs(job) and not job.is_paused


def waits_unpaused(job: Pending) -> bool:
    return waits(job) and not job.is_paused


def is_paused(job: Pending) -> bool:
    return job.is_paused


def target(app: App, client: Client, job: str | None, command: str, *choices: Choice) -> str:
    """Return the named job or sweep, else the only job of the first choice that any job fits.

    Considers jobs of the command line only. Raises NotFound when none fits, and Conflict, after
    listing them, when several do.
    """
    if job is not None and job != "-":
        return client.groups.find_any(job)
    pending = client.jobs.pending()
    for choice in choices:
        found = [one for one in pending if choice(one)]
        if len(found) == 1:
            return found[0].id
        if found:
            lines = [(one.id, "paused" if one.is_paused else one.status) for one in found]
            raise ambiguous(app, command, lines)
    raise NotFound(f"job: nothing to {command}: no job of the command line runs or waits for that")


def ambiguous(app: App, command: str, found: Sequence[tuple[str, str]]) -> Conflict:
    """Print the candidates, each with the command to type; return the error."""
    for job_id, about in found[:_MOST_LISTED]:
        note(f"{app.command(f'{command} {job_id}')}  # {about}")
    more = len(found) - _MOST_LISTED
    if more > 0:
        note(f"and {more} more")
    return Conflict(f"job: must be named: {command} may mean any of {len(found)} jobs")
