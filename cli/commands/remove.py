"""Removing ended jobs: `rm` by name and `clean` by age."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ...daemon.lifecycle.statuses import ENDED
from ...jobs.errors import Conflict, SpecError
from ..shared.app import App, common_options, note
from ..shared.job_argument import complete_job
from ..view import render
from ..view.times import parse_duration

if TYPE_CHECKING:
    from ...daemon.client.client import Client


@click.command()
@click.argument("jobs", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@common_options
@click.pass_obj
def rm(app: App, jobs: tuple[str, ...]) -> None:
    """Remove ended JOBs: run directories and records.

    A sweep is removed with all its jobs. All of them or none: a job that runs or waits, or that
    another job still needs, is refused.
    """
    client = app.client()
    freed = client.finish_removals()  # of a call that was killed
    ids = [client.find_any(job) for job in jobs if not any(half.startswith(job) for half in freed)]
    client.check_removal(ids)
    for half, num_bytes in freed.items():
        _show(app, half, num_bytes, is_removed=True)
    for job_id in dict.fromkeys(ids):
        freed[job_id] = client.remove(job_id)
        _show(app, job_id, freed[job_id], is_removed=True)
    _sum_up(freed, is_removed=True)


@click.command()
@click.option(
    "--older-than",
    required=True,
    metavar="AGE",
    help="Minimum time since the end of a job: 30d, 12h.",
)
@click.option(
    "--status",
    default=",".join(ENDED),
    show_default=True,
    metavar="STATUS,...",
    help="Only jobs with these statuses.",
)
@click.option(
    "--keep-models",
    is_flag=True,
    help="Keep jobs that produced a model; remove only their checkpoints and initial weights.",
)
@click.option("--dry-run", is_flag=True, help="Only show what would be removed.")
@common_options
@click.pass_obj
def clean(app: App, older_than: str, status: str, keep_models: bool, dry_run: bool) -> None:
    """Remove jobs that ended some time ago.

    Running and waiting jobs are kept, and so are jobs that another job still needs.
    """
    statuses = _statuses(status)
    age_s = parse_duration("older_than", older_than)
    client = app.client()
    before = client.now() - age_s
    freed = {} if dry_run else client.finish_removals()
    for half, num_bytes in freed.items():
        _show(app, half, num_bytes, is_removed=True)
    needed = client.needed()
    for job_id in client.ended(statuses, before=before):  # newest first: a job before its parent
        needed_by = [one for one in needed.get(job_id, ()) if one not in freed]
        if needed_by:
            note(f"{job_id} is kept: it is still needed by {', '.join(needed_by[:3])}")
            continue
        try:
            size = _clean(client, job_id, keep_model=keep_models, dry_run=dry_run)
        except Conflict as error:  # resumed meanwhile
            note(str(error))
            continue
        if size is not None:
            freed[job_id] = size
            _show(app, job_id, size, is_removed=not dry_run)
    _sum_up(freed, is_removed=not dry_run)


def _statuses(text: str) -> list[str]:
    statuses = text.split(",")
    for status in statuses:
        if status not in ENDED:
            raise SpecError("status", f"must be some of {','.join(ENDED)}, got {text!r}")
    return statuses


def _clean(client: Client, job_id: str, *, keep_model: bool, dry_run: bool) -> int | None:
    """Remove a job, or all but its model; return the bytes freed. None: nothing to remove."""
    from ...daemon.lifecycle.remove import has_model, resume_bytes, size_bytes
    from ...daemon.runs.rundir import RunDir

    rundir = RunDir(client.home.runs / job_id)
    if keep_model and has_model(client.places, job_id):
        size = resume_bytes(client.places, job_id)
        return (size if dry_run else client.remove_resume_state(job_id)) if size else None
    return size_bytes(rundir.path) if dry_run else client.remove(job_id)


def _show(app: App, job_id: str, size: int, *, is_removed: bool) -> None:
    if app.as_json:
        render.json_line({"id": job_id, "bytes": size, "removed": is_removed})
    else:
        click.echo(f"{job_id}  {render.size(size)}")


def _sum_up(freed: dict[str, int], *, is_removed: bool) -> None:
    total = render.size(sum(freed.values()))
    note(f"{'freed' if is_removed else 'would free'} {total}" if freed else "nothing to remove")
