"""Acting on a job: `cancel`, `pause` and `resume`."""

from __future__ import annotations

import click

from ...jobs import KINDS, spec_class
from ...jobs.ids import kind_of
from ..shared.app import App, common_options, note
from ..shared.job_argument import job_argument
from ..shared.option_values import from_settings
from ..shared.target import is_paused, runs, runs_unpaused, target, waits, waits_unpaused
from ..view import render


@click.command()
@job_argument
@click.option(
    "--now", is_flag=True, help="Stop it at once; work since its latest checkpoint is lost."
)
@common_options
@click.pass_obj
def cancel(app: App, job: str | None, now: bool) -> None:
    """Remove waiting JOB from its queue, or save and stop running JOB.

    A running job saves a checkpoint, from which `warmd resume` continues. Without JOB: the only
    running job that was submitted on the command line, otherwise the only waiting one.
    """
    client = app.client()
    job_id = target(app, client, job, "cancel --now" if now else "cancel", runs, waits)
    _report(app, job_id, client.jobs.kill(job_id) if now else client.jobs.cancel(job_id))


@click.command()
@job_argument
@click.option(
    "--release",
    is_flag=True,
    help="Save the job and end its process, which frees its memory; for a long pause or a restart.",
)
@common_options
@click.pass_obj
def pause(app: App, job: str | None, release: bool) -> None:
    """Pause JOB at the end of its current step.

    A running job stays in memory and continues at once on `warmd resume`. A waiting job leaves its
    queue. Without JOB: the only running job that was submitted on the command line, otherwise the
    only waiting one.
    """
    client = app.client()
    command = "pause --release" if release else "pause"
    job_id = target(app, client, job, command, runs_unpaused, waits_unpaused)
    _report(app, job_id, client.jobs.pause(job_id, release=release))


@click.command()
@job_argument
@click.option("--steps", metavar="N", help="New total number of steps.  [default: unchanged]")
@click.option(
    "--time-limit",
    metavar="DURATION",
    help="New running time of a job that has a time limit.  [default: unchanged]",
)
@click.option("--learning-rate", metavar="X", help="New learning rate.  [default: unchanged]")
@click.option(
    "--save-every",
    metavar="TEXT",
    help="New interval between checkpoints: steps (25) or minutes (10m).  [default: unchanged]",
)
@click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="New value of another option that may change on resume. May be repeated.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Refuse to resume if the code of a reward has changed since the checkpoint.",
)
@common_options
@click.pass_obj
def resume(
    app: App, /, job: str | None, settings: tuple[str, ...], strict: bool, **given: str | None
) -> None:
    """Continue paused JOB, or queue JOB again after it was stopped.

    A job that was canceled or has failed resumes from its latest checkpoint; with --steps or
    --time-limit, the learning-rate schedule is that of the new length. A job that is paused while
    it waits returns to the front of its queue. Without JOB: the only paused job; if none is paused,
    or with a new value of an option, the latest job.
    """
    client = app.client()
    has_changes = bool(settings) or any(value is not None for value in given.values())
    if job is None and not has_changes and any(map(is_paused, client.jobs.pending())):
        job_id = target(app, client, None, "resume", is_paused)
    else:
        job_id = client.groups.find_any(job)
    kind = kind_of(job_id)
    options = spec_class(kind).options() if kind in KINDS else {}
    changes = from_settings(settings, options)
    changes |= {name: value for name, value in given.items() if value is not None}
    outcome = client.jobs.resume(job_id, changes=changes, strict=strict)
    for file in client.jobs.changed_sources(job_id):
        note(f"warning: {file} changed since the latest checkpoint; --strict would refuse this")
    _report(app, job_id, outcome)
    if outcome == "finished" and "steps" in options:
        longer = app.command(f"resume {job_id} --steps N")
        note(f"all steps are done; train for more steps with: {longer}")


def _report(app: App, job_id: str, outcome: str) -> None:
    if app.as_json:
        render.json_line({"id": job_id, "outcome": outcome})
    else:
        click.echo(f"{job_id} {outcome}")
