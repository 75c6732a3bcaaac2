"""Acting on a job: `cancel`, `kill` and `resume`."""

from __future__ import annotations

import click

from . import render
from .app import App, common_options
from .completion import job_argument


@click.command()
@job_argument
@common_options
@click.pass_obj
def cancel(app: App, job: str | None) -> None:
    """Take JOB out of its queue, or let it save and stop.

    A running job commits a checkpoint, from which `resume` goes on.
    """
    client = app.client()
    job_id = client.find(job)
    _report(app, job_id, client.cancel(job_id))


@click.command()
@job_argument
@common_options
@click.pass_obj
def kill(app: App, job: str | None) -> None:
    """End JOB now, losing what it did since its last checkpoint."""
    client = app.client()
    job_id = client.find(job)
    _report(app, job_id, client.kill(job_id))


@click.command()
@job_argument
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    help="Go on to that many steps in all.  [default: as submitted]",
)
@common_options
@click.pass_obj
def resume(app: App, job: str | None, steps: int | None) -> None:
    """Queue JOB again after cancel, kill or failure.

    It goes on from its latest checkpoint.
    """
    client = app.client()
    job_id = client.find(job)
    _report(app, job_id, client.resume(job_id, steps=steps))


def _report(app: App, job_id: str, outcome: str) -> None:
    if app.as_json:
        render.json_line({"id": job_id, "outcome": outcome})
    else:
        click.echo(f"{job_id} {outcome}")
