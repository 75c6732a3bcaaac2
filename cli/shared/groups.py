"""Shared by the commands `sweep` and `curriculum`: names of groups, and their lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from ..view import render
from .app import App

if TYPE_CHECKING:
    from ...daemon.client.client import Client


def limit_option(plural: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The option `--limit` of a command that lists groups."""
    return click.option(
        "--limit",
        type=click.IntRange(min=1),
        default=20,
        show_default=True,
        metavar="N",
        help=f"Most {plural} to list.",
    )


def group_named(
    client: Client, kind: str, text: str | None, newest: Sequence[Mapping[str, Any]], hint: str
) -> str:
    """Return the id of a group by its id, a prefix of one or a name; None: the newest one.

    `kind`: sweep or curriculum. `newest`: that one, if there is any. `hint`: how to create one.
    Raises NotFound and SpecError.
    """
    from ...daemon.groups.folder import is_group_id
    from ...jobs.errors import NotFound, SpecError
    from ...jobs.ids import kind_of

    if text is None:
        if not newest:
            raise NotFound(f"{kind}: none yet: {hint}")
        return str(newest[0]["id"])
    found = client.find_any(text)
    if not is_group_id(found) or kind_of(found) != kind:
        raise SpecError(kind, f"must be a {kind}, got {found}")
    return found


def print_groups(
    app: App,
    found: Sequence[Mapping[str, Any]],
    columns: Mapping[str, Callable[[Mapping[str, Any]], str]],
    *,
    kind: str,
    hint: str,
) -> None:
    """Print groups, newest first, a line each: with `columns` between status and creation."""
    if app.as_json:
        for one in found:
            render.json_line(one)
        return
    rows = [
        [
            one["id"],
            render.labels(one),
            one["kind"],
            render.status(str(one["status"])),
            *(cell(one) for cell in columns.values()),
            render.clock(one["created_at"]),
        ]
        for one in found
    ]
    headers = [kind.upper(), "NAME", "KIND", "STATUS", *columns, "CREATED"]
    render.print_table(headers, rows, empty=f"no {kind} yet: {hint}")
