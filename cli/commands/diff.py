"""`warmd diff`: the differences between two jobs."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from ..shared.app import App, common_options
from ..shared.job_argument import complete_job
from ..shared.names import names_of
from ..view import render


@click.command()
@click.argument("one", metavar="JOB", shell_complete=complete_job)
@click.argument("other", metavar="JOB", shell_complete=complete_job)
@common_options
@click.pass_obj
def diff(app: App, one: str, other: str) -> None:
    """Compare two jobs: options, data, code and results.

    Only what differs is shown. Data files are compared by content, code by the modules that the
    jobs imported. Needs no daemon.
    """
    from ...daemon.reports.diff import differences

    client = app.reader()
    ids = [client.find(one), client.find(other)]
    found = differences(*map(client.rundir, ids))
    if app.as_json:
        for difference in found:
            render.json_line(asdict(difference))
        return
    rows = [[d.section, d.name, _text(d.one), _text(d.other)] for d in found]
    names = names_of(client, ids)
    render.print_table(["IN", "WHAT", *map(names.__getitem__, ids)], rows, empty="nothing differs")


def _text(value: Any) -> str:
    if value is None:
        return render.NOTHING
    if isinstance(value, int | float) and not isinstance(value, bool):
        return render.number(value)
    items = value if isinstance(value, list) else [value]
    return render.one_line(", ".join(map(str, items)))
