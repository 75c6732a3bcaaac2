"""`warmd probe`: liveness and readiness, for containers and Kubernetes."""

from __future__ import annotations

import click

from ..shared.app import App, common_options
from ..view import render

_TIMEOUT_S = 5.0


@click.command()
@click.argument("what", metavar="live|ready", type=click.Choice(["live", "ready"]))
@common_options
@click.pass_obj
def probe(app: App, what: str) -> None:
    """Check whether the daemon is live or ready, for containers.

    live: its main loop runs, even while it loads models or waits for Redis. If it is not live,
    restart it. ready: all its workers accept jobs. Exit code: 0 yes; 3 no, and the reason is
    printed.
    """
    from ...daemon.client import control

    check = control.check_live if what == "live" else control.check_ready
    check(app.config(), timeout_s=_TIMEOUT_S)
    if app.as_json:
        render.json_line({what: True})
    else:
        click.echo(what)
