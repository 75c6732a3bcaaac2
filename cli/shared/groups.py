"""The list of sweeps or curricula, as `jobs --kind sweep` and `--kind curriculum` print it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..view import render
from .app import App


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
