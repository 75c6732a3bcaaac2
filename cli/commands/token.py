"""`warmd token`: the named tokens of the HTTP API."""

from __future__ import annotations

from pathlib import Path

import click

from ...configs.values import ConfigError
from ..shared.app import App, common_options, note
from ..view import render


@click.command()
@click.argument("name", required=False)
@click.option(
    "--may",
    metavar="RIGHTS",
    help="Add NAME with these rights, some of read,infer,train, and print its new secret.",
)
@click.option("--remove", "is_removed", is_flag=True, help="Remove NAME.")
@common_options
@click.pass_obj
def token(app: App, name: str | None, may: str | None, is_removed: bool) -> None:
    """Add, remove or list named tokens of the HTTP API.

    Without NAME, list them. A running gateway notices the change within 5 seconds: a name that was
    removed loses its sessions and its open requests. The setting `http_tokens` names the file.
    """
    if name is None and (may is not None or is_removed):
        raise click.UsageError("Missing argument 'NAME'.")
    if name is not None and (may is not None) == is_removed:
        raise click.UsageError("Give NAME with one of --may and --remove.")
    if (path := app.config().http_tokens) is None:
        raise ConfigError(
            "http_tokens", "must be a file, such as `http_tokens: tokens` in the settings"
        )
    if name is None:
        _list(app, path)
    elif may is not None:
        _add(app, path, name, may)
    else:
        _remove(app, path, name)


def _list(app: App, path: Path) -> None:
    from ...configs.tokens import read

    found = read(path)
    if app.as_json:
        for one in found:
            render.json_line({"name": one.name, "may": one.may.split(",")})
    else:
        render.print_table(["NAME", "MAY"], [[one.name, one.may] for one in found])


def _add(app: App, path: Path, name: str, may: str) -> None:
    from ...daemon.client import tokens

    secret = tokens.add(path, name, may)
    if app.as_json:
        render.json_line({"name": name, "may": may.split(","), "secret": secret})
    else:
        click.echo(secret)
        note(f"{name} may {may}. The secret is not stored and not shown again.")


def _remove(app: App, path: Path, name: str) -> None:
    from ...daemon.client import tokens

    tokens.remove(path, name)
    if app.as_json:
        render.json_line({"name": name, "removed": True})
    else:
        click.echo(f"{name} removed")
