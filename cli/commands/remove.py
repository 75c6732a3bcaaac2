"""`warmd rm`: removes ended jobs, by name or by age."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ...daemon.lifecycle.statuses import ENDED
from ...jobs.durations import parse_duration
from ...jobs.errors import Conflict, SpecError
from ..shared.app import App, common_options, note
from ..shared.job_argument import complete_job
from ..view import render

if TYPE_CHECKING:
    from ...daemon.client.client import Client


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=complete_job)
@click.option(
    "--older-than",
    metavar="AGE",
    help="Instead of JOBs: all that ended at least this long ago, such as 30d or 12h.",
)
@click.option(
    "--status",
    metavar="STATUS,...",
    help=f"With --older-than: only jobs with these statuses.  [default: {','.join(ENDED)}]",
)
@click.option(
    "--keep-models",
    is_flag=True,
    help="With --older-than: keep jobs that produced a model; remove only their checkpoints and "
    "initial weights.",
)
@click.option("--dry-run", is_flag=True, help="With --older-than: only show what would be removed.")
@common_options
@click.pass_obj
def rm(
    app: App,
    jobs: tuple[str, ...],
    older_than: str | None,
    status: str | None,
    keep_models: bool,
    dry_run: bool,
) -> None:
    """Remove ended JOBs, or those that ended some time ago.

    Run directories and records are removed; a sweep with all its jobs. A job that runs or waits, or
    that another job still needs, is refused: then none of the JOBs is removed. With --older-than
    such jobs are kept.
    """
    if older_than is not None:
        if jobs:
            raise SpecError("older_than", "must not go with a JOB")
        statuses = list(ENDED) if status is None else _statuses(status)
        age_s = parse_duration("older_than", older_than)
        _remove_old(app, statuses, age_s, keep_models=keep_models, dry_run=dry_run)
        return
    for name, given in (("status", status), ("keep_models", keep_models), ("dry_run", dry_run)):
        if given:
            raise SpecError(name, "must go with older_than")
    if not jobs:
        raise SpecError("job", "must be named, or older_than be given")
    _remove(app, jobs)


def _remove(app: App, jobs: Sequence[str]) -> None:
    client = app.client()
    freed = client.jobs.finish_removals()  # of a call that was killed
    left = [job for job in jobs if not any(half.startswith(job) for half in freed)]
    ids = [client.groups.find_any(job) for job in left]
    client.jobs.check_removal(ids)
    for half, num_bytes in freed.items():
        _show(app, half, num_bytes, is_removed=True)
    for job_id in dict.fromkeys(ids):
        freed[job_id] = client.jobs.remove(job_id)
        _show(app, job_id, freed[job_id], is_removed=True)
    _sum_up(freed, is_removed=True)


def _remove_old(
    app: App, statuses: Sequence[str], age_s: float, *, keep_models: bool, dry_run: bool
) -> None:
    client = app.client()
    before = client.now() - age_s
    freed = {} if dry_run else client.jobs.finish_removals()
    for half, num_bytes in freed.items():
        _show(app, half, num_bytes, is_removed=True)
    needed = client.jobs.needed()
    ended = client.jobs.ended(statuses, before=before)  # newest first: a job before its parent
    for job_id in ended:
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
        return (size if dry_run else client.jobs.remove_resume_state(job_id)) if size else None
    return size_bytes(rundir.path) if dry_run else client.jobs.remove(job_id)


def _show(app: App, job_id: str, size: int, *, is_removed: bool) -> None:
    if app.as_json:
        render.json_line({"id": job_id, "bytes": size, "removed": is_removed})
    else:
        click.echo(f"{job_id}  {render.size(size)}")


def _sum_up(freed: dict[str, int], *, is_removed: bool) -> None:
    total = render.size(sum(freed.values()))
    note(f"{'freed' if is_removed else 'would free'} {total}" if freed else "nothing to remove")
