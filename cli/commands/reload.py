"""`warmd reload`: new processes after an upgrade, while jobs run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import click

from ..shared.app import App, common_options, note
from ..view import render
from ..view.live import ClockLine, has_live_lines


@click.command()
@common_options
@click.pass_obj
def reload(app: App) -> None:
    """Use upgraded libraries in new processes, without interrupting jobs.

    A new zygote, the process that holds libraries and models, starts next to the old one and takes
    its place when it is ready; if it cannot start, nothing changes. Then the workers are replaced.
    A worker with a running training job is replaced when that job has ended; until then, waiting
    training jobs do not start. Supervisor, gateway and Redis are not replaced, and the settings are
    not read again: that takes `warmd stop` and `warmd start`.
    """
    from ...daemon.client import control

    config = app.config()
    begun = time.monotonic()
    with ClockLine(enabled=has_live_lines() and not app.as_json) as line:
        for progress in control.reload(config):
            if app.as_json:
                render.json_line(progress)
                continue
            line.show("")
            if progress["stage"] == "begin":
                for upgrade in progress["upgrades"] or ["nothing was upgraded"]:
                    note(upgrade)
            elif progress["stage"] == "ready":
                click.echo(f"reloaded in {render.duration(time.monotonic() - begun)}")
                for running in progress["waiting"]:
                    note(_rest(running))
            else:
                line.show(f"{progress['stage']} {progress['detail']} …")


def _rest(running: Mapping[str, Any]) -> str:
    return f"{running['job']} ends in the old process of {running['worker']}"
