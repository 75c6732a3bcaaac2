"""How values look: durations, sizes, times and tables for people, JSON lines for programs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click

from ...configs.units import format_duration, format_size

STATUS_COLOURS = {
    "started": "green",
    "finished": "green",
    "failed": "red",
    "stopped": "yellow",
    "canceled": "yellow",
    "paused": "yellow",
    "deferred": "cyan",
    "scheduled": "cyan",
}

NOTHING = "-"


def json_line(value: Mapping[str, Any]) -> None:
    """Print one JSON object on stdout; NaN becomes null."""
    import orjson

    click.echo(orjson.dumps(value, default=str))


def duration(seconds: float | None) -> str:
    """0.42 s, 3.2 s, 42 s, 3m 20s, 2h 05m, 3d 4h."""
    return NOTHING if seconds is None else format_duration(seconds)


def size(num_bytes: float | None) -> str:
    """Bytes in powers of ten: 812 MB, 1.98 GB."""
    return NOTHING if num_bytes is None else format_size(num_bytes)


def clock(at: float | None, *, now: float | None = None) -> str:
    """A moment in unix seconds, as local time of day; with the date where it is not today's."""
    if at is None:
        return NOTHING
    now = time.time() if now is None else now
    then, today = time.localtime(at), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    if abs(at - now) < 6 * 86400:
        return time.strftime("%a %H:%M", then)
    return time.strftime("%Y-%m-%d %H:%M", then)


def number(value: float) -> str:
    """Four significant digits; a whole number in full."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def steps(job: Mapping[str, Any]) -> str:
    """How far a job is: 12/80."""
    total = job.get("steps_total")
    if not total:
        return NOTHING
    return f"{job.get('step') or 0}/{total}"


def status(word: str) -> str:
    """A status in its colour."""
    return click.style(word, fg=STATUS_COLOURS[word]) if word in STATUS_COLOURS else word


def one_line(text: object) -> str:
    """Text of unknown origin, safe on a terminal: no line breaks, no control characters."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(shown.split())


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, width: int) -> list[str]:
    """Align rows under their headers. The last column gives way where a line exceeds `width`.

    Headers that start with ">" name columns of numbers, set to the right.
    """
    titles = [header.lstrip(">") for header in headers]
    lines = [titles, *rows]
    widths = [max(len(click.unstyle(line[i])) for line in lines) for i in range(len(titles))]
    room = max(width - sum(widths[:-1]) - 2 * (len(widths) - 1), 8)
    drawn = []
    for line in lines:
        cells = [*line[:-1], _shorten(line[-1], room)]
        padded = [
            _pad(cell, widths[i], to_the_right=headers[i].startswith(">"))
            for i, cell in enumerate(cells)
        ]
        drawn.append("  ".join(padded).rstrip())
    drawn[0] = click.style(drawn[0], bold=True)
    return drawn


def _pad(cell: str, width: int, *, to_the_right: bool) -> str:
    space = " " * (width - len(click.unstyle(cell)))
    return space + cell if to_the_right else cell + space


def _shorten(cell: str, width: int) -> str:
    return cell if len(click.unstyle(cell)) <= width else cell[: width - 1] + "…"


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table on stdout: cut to the terminal's width, in full anywhere else.

    An empty one is a note on stderr.
    """
    if not rows:
        click.echo("nothing to show", err=True)
        return
    import shutil
    import sys

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 10_000
    for line in table(headers, rows, width=width):
        click.echo(line)


def print_fields(fields: Mapping[str, str]) -> None:
    """Print names and values under each other."""
    widest = max(map(len, fields))
    for name, value in fields.items():
        click.echo(f"{name:<{widest}}  {value}")
