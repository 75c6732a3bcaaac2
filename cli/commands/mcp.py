"""`warmd mcp`: a server of the Model Context Protocol on stdin and stdout."""

from __future__ import annotations

import click

from ...jobs.errors import SpecError, Unavailable
from ..shared.app import App, common_options


@click.command()
@click.option(
    "--url",
    metavar="URL",
    help="The HTTP API of another machine's daemon, as https://HOST; WARMD_HTTP_TOKEN is its "
    "token.  [default: that of the daemon of this home]",
)
@common_options
@click.pass_obj
def mcp(app: App, url: str | None) -> None:
    """Serve jobs as tools for agents, by the Model Context Protocol.

    A program for agents starts this command and speaks with it on stdin and stdout; nothing
    listens. The tools list kinds and models, upload data, submit, wait for, evaluate, compare and
    cancel jobs. What a tool may do is what the HTTP API and its token allow: it can name neither
    code nor a path. Needs pip install 'warmd[mcp]'.
    """
    try:
        from ..mcp.gateway import Gateway, checked_address
        from ..mcp.tools import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("httpx2", "mcp", "mcp_types"):
            raise
        raise SpecError("mcp", "needs the package mcp: pip install 'warmd[mcp]'") from None
    address = None if url is None else checked_address(url)
    config = app.config()

    def locate() -> str:
        from ...daemon.client import control

        if address is not None:
            return address
        http = control.status(config)["http"]
        if http["url"] is None:
            raise Unavailable(f"the gateway does not run: {http['problem'] or 'http_port is off'}")
        return str(http["url"])

    serve(Gateway(locate, config.http_token))
