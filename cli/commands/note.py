"""`warmd note`: notes on a job."""

from __future__ import annotations

from dataclasses import asdict

import click

from ..shared.app import App, common_options
from ..shared.job_argument import complete_job
from ..view import render


@click.command()
@click.argument("job", metavar="JOB", shell_complete=complete_job)
@click.argument("text", required=False, metavar="[TEXT]")
@common_options
@click.pass_obj
def note(app: App, job: str, text: str | None) -> None:
    """Add a note to JOB, or print its notes.

    Notes have no effect on the job. `warmd show` prints them as well.
    """
    client = app.reader()
    job_id = client.find(job)
    labels = client.labels(job_id) if text is None else client.add_note(job_id, text)
    if app.as_json:
        render.json_line({"id": job_id, "notes": [asdict(note) for note in labels.notes]})
    elif text is None:
        for remark in labels.notes:
            click.echo(f"{render.moment(remark.time)}  {render.one_line(remark.text)}")
