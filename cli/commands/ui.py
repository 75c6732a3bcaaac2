"""`warmd ui`: the address of the dashboard, opened in a browser where there is one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from urllib.parse import urlsplit

import click

from ...jobs.errors import Conflict, Unavailable
from ..shared.app import App, common_options, note
from ..view import render


@click.command()
@common_options
@click.pass_obj
def ui(app: App) -> None:
    """Open the dashboard in the browser.

    Prints its address. In an SSH session, also prints the SSH command that forwards the dashboard
    to your own machine.
    """
    from ...daemon.client import control

    config = app.config()
    if config.http_port is None or config.http_page == "off":
        name = "http_port" if config.http_port is None else "http_page"
        raise Conflict(f"{name}: must not be off for the dashboard")
    http = control.status(config)["http"]
    if http["url"] is None:
        raise Unavailable(f"the gateway does not run: {http['problem'] or 'it is starting'}")
    address = f"{http['url']}/"
    if app.as_json:
        render.json_line({"url": address})
        return
    click.echo(address)
    if tunnel := tunnel_of(address, os.environ):
        note(f"From your own machine: {tunnel}, then open the address there.")
    elif os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"):
        import webbrowser

        webbrowser.open(address)


def tunnel_of(address: str, environ: Mapping[str, str]) -> str | None:
    """Return the SSH command that forwards the address; None outside of an SSH session."""
    words = environ.get("SSH_CONNECTION", "").split()  # client, its port, this machine, its port
    if len(words) != 4:
        return None
    port = urlsplit(address).port
    host = f"{environ['USER']}@{words[2]}" if environ.get("USER") else words[2]
    at = "" if words[3] == "22" else f"-p {words[3]} "
    return f"ssh {at}-N -L {port}:127.0.0.1:{port} {host}"
