"""`warmd samples`: completions that a GRPO job was trained on, with their rewards."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import click

from ...jobs.errors import NotFound
from ..shared.app import App, common_options
from ..shared.job_argument import complete_job
from ..view import render


@click.command()
@click.argument("job", required=False, metavar="[JOB]", shell_complete=complete_job)
@click.argument("step", required=False, type=click.IntRange(min=1, max=10**9), metavar="[STEP]")
@common_options
@click.pass_obj
def samples(app: App, job: str | None, step: int | None) -> None:
    """Show completions on which GRPO JOB was trained.

    Without STEP: those of its latest step. `submit grpo --log-completions N` sets how many of each
    step are kept. Needs no daemon.
    """
    from ...daemon.runs import events

    client = app.client()
    job_id = client.find(job, is_training=True)
    found: Mapping[str, Any] | None = None
    for event in events.read(client.rundir(job_id).events):
        if event["type"] == "step" and event.get("samples") and step in (None, event["step"]):
            found = event
    if found is None:
        of_step = "" if step is None else f" of step {step}"
        raise NotFound(f"step: {job_id} has no completions{of_step}; --log-completions keeps them")
    if app.as_json:
        for sample in found["samples"]:
            render.json_line({"job": job_id, "step": found["step"], **sample})
        return
    click.secho(f"{job_id}  step {found['step']}", bold=True)
    for line in sample_lines(found, width=render.columns(sys.stdout)):
        click.echo(line)


def sample_lines(event: Mapping[str, Any], *, width: int) -> list[str]:
    """Return the completions of a step event, each below its prompt, with its rewards."""
    lines: list[str] = []
    for sample in event.get("samples") or ():
        values = sample.get("rewards") or {}
        rewards = "  ".join(f"{n} {render.number(v)}" for n, v in values.items() if v is not None)
        for name, text in (("prompt", sample["prompt"]), ("completion", sample["completion"])):
            line = f"{name:<12}{render.one_line(text)}"
            lines += render.wrapped(line, width=width, indent=12)
        lines += [click.style(f"{'reward':<12}{rewards}", fg="cyan"), ""]
    return lines
