"""`warmd notify test`: sends a test notification as configured."""

from __future__ import annotations

import click

from ...jobs.errors import JobFailed, NotFound
from ..shared.app import App, common_options
from ..view import render


@click.group()
@common_options
def notify() -> None:
    """Test the delivery of notifications.

    With the setting `notify`, a command or a URL, the daemon reports jobs that end or have trouble.
    """


@notify.command()
@common_options
@click.pass_obj
def test(app: App) -> None:
    """Send a test notification, in the way in which the daemon sends them.

    The running daemon delivers it; without one this command does. Exit code 1: it could not be
    delivered.
    """
    from ...daemon.client import control
    from ...daemon.host.home import Home
    from ...daemon.notify.delivery import deliver, sample

    config = app.config()
    is_by_daemon = Home(config.home).is_locked()
    by = "the daemon" if is_by_daemon else "this command, as no daemon runs"
    if is_by_daemon:
        problem = control.notify_test(config)
    elif config.notify is None:
        raise NotFound("notify: not set: add `notify: COMMAND` or `notify: URL` to the settings")
    else:
        problem = deliver(config.notify, sample())
    if problem is not None:
        raise JobFailed(f"notify: {problem} (tried by {by})")
    if app.as_json:
        render.json_line({"delivered": True, "by": "daemon" if is_by_daemon else "command"})
    else:
        click.echo(f"delivered by {by}")
