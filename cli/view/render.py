"""Formats values: durations, sizes, times and tables for people, JSON lines for programs."""

from __future__ import annotations

import shutil
import sys
import textwrap
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import click

from ...configs.units import format_duration, format_size

STATUS_COLORS = {
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
    """A time in unix seconds, as local time of day; with the day or date unless it is today."""
    if at is None:
        return NOTHING
    now = time.time() if now is None else now
    then, today = time.localtime(at), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    if abs(at - now) < 6 * 86400:
        return time.strftime("%a %H:%M", then)
    return time.strftime("%Y-%m-%d %H:%M", then)


def moment(at: float) -> str:
    """A time in unix seconds, as local date and time to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


_DIRECTIONS = (*range(0x202A, 0x202F), *range(0x2066, 0x206A))  # they reorder the text around them
_CONTROLS = dict.fromkeys([*range(9), *range(11, 32), 127, *range(128, 160), *_DIRECTIONS])


def printable(text: str) -> str:
    """Text without control characters, which could steer the terminal; tabs and line ends stay."""
    return text.translate(_CONTROLS)


def number(value: float) -> str:
    """Four significant digits; a whole number in full."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def steps(job: Mapping[str, Any]) -> str:
    """How far a job is, in steps or in records of its input file: 12/80."""
    total = job.get("steps_total")
    if not total and job.get("rows_total"):
        return f"{job['rows_done']}/{job['rows_total']}"
    if not total:
        return NOTHING
    return f"{job.get('step') or 0}/{total}"


def status(word: str) -> str:
    """A status in its color."""
    return click.style(word, fg=STATUS_COLORS[word]) if word in STATUS_COLORS else word


def model(name: str) -> str:
    """The name of a loaded model in words: JOB:init is the one that a job started from."""
    job, colon, _ = name.partition(":init")
    return f"start of {job}" if colon else name


def labels(job: Mapping[str, Any]) -> str:
    """The name of a job and its tags, each with a #; without the id of its group, which is one."""
    groups = (job.get("sweep"), job.get("curriculum"))
    tags = (tag for tag in job.get("tags") or () if tag not in groups)
    words = [job.get("name"), *(f"#{tag}" for tag in tags)]
    return " ".join(one_line(word) for word in words if word)


def one_line(text: object) -> str:
    """Text of unknown origin, safe on a terminal: no line breaks, no control characters."""
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return " ".join(shown.split())


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], *, width: int) -> list[str]:
    """Align rows under their headers, in lines of at most `width` where the cells allow it.

    Headers that start with ">" name right-aligned columns of numbers, which are never cut, as job
    ids are not. Tables that are too wide are shortened in this order: the last column is cut at its
    end, other texts are cut in the middle, and the last column moves to lines of its own, below
    each row.
    """
    titles = [header.lstrip(">") for header in headers]
    lines = [titles, *rows]
    full = [max(len(click.unstyle(line[i])) for line in lines) for i in range(len(titles))]
    is_whole = [header.startswith(">") or header in _NEVER_CUT for header in headers]
    last = full[-1] if is_whole[-1] else min(full[-1], _LEAST_LAST)
    widths, excess = _cut_widths([*full[:-1], last], [*is_whole[:-1], True], width)
    is_below = excess > 0 and not is_whole[-1]
    if is_below:
        widths, _ = _cut_widths(full[:-1], is_whole[:-1], width)
    elif not is_whole[-1]:
        widths[-1] = min(full[-1], width - sum(widths[:-1]) - 2 * (len(widths) - 1))
    columns = range(len(widths))
    drawn = []
    for line in lines:
        cells = [_cut(line[i], widths[i], at_end=i == len(full) - 1) for i in columns]
        padded = [
            _pad(cells[i], widths[i], to_the_right=headers[i].startswith(">")) for i in columns
        ]
        drawn.append("  ".join(padded).rstrip())
        if is_below and line is not titles and line[-1]:
            text = f"  {titles[-1].lower()}: {click.unstyle(line[-1])}"
            drawn += wrapped(text, width=width, indent=4)
    drawn[0] = click.style(drawn[0], bold=True)
    return drawn


def _cut_widths(
    widths: Sequence[int], is_whole: Sequence[bool], width: int
) -> tuple[list[int], int]:
    """Cut columns that are not whole, from the right, until all fit; return the excess."""
    cut = list(widths)
    excess = sum(cut) + 2 * (len(cut) - 1) - width
    for i in reversed(range(len(cut))):
        if excess > 0 and not is_whole[i]:
            less = max(min(excess, cut[i] - _LEAST), 0)
            cut[i] -= less
            excess -= less
    return cut, excess


_NEVER_CUT = ("JOB", "STATUS", "STATE")
_LEAST = 12  # columns of a text that is cut
_LEAST_LAST = 16  # columns of the last one, else it gets lines of its own


def _pad(cell: str, width: int, *, to_the_right: bool) -> str:
    space = " " * (width - len(click.unstyle(cell)))
    return space + cell if to_the_right else cell + space


def _cut(cell: str, width: int, *, at_end: bool) -> str:
    if len(click.unstyle(cell)) <= width:
        return cell
    cell = click.unstyle(cell)
    tail = 0 if at_end else (width - 1) // 2
    return cell[: width - 1 - tail] + "…" + cell[len(cell) - tail :]


# A blank within a phrase that no line is broken at. `wrapped` prints it as a blank.
_TIE = "\N{NO-BREAK SPACE}"
_LONGEST_PHRASE = 40


def phrase(text: str) -> str:
    """Return a text that `wrapped` keeps on one line, unless it is long."""
    return text.replace(" ", _TIE) if len(text) <= _LONGEST_PHRASE else text


def wrapped(text: str, *, width: int, indent: int) -> list[str]:
    """Break a text between words into lines of at most `width`; all but the first are indented.

    A word that is longer stays whole, so that a path can be copied.
    """
    lines = textwrap.wrap(
        text,
        max(width, indent + 20),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_TIE, " ") for line in lines] or [""]


def columns(stream: TextIO) -> int:
    """Return the width of the terminal that a stream is; elsewhere lines are never broken."""
    return shutil.get_terminal_size().columns if stream.isatty() else 10_000


def print_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], *, empty: str = "nothing to show"
) -> None:
    """Print a table on stdout: in the terminal's width, in full anywhere else.

    An empty one is a note on stderr.
    """
    if not rows:
        click.echo(empty, err=True)
        return
    for line in table(headers, rows, width=columns(sys.stdout)):
        click.echo(line)


def print_fields(fields: Mapping[str, str]) -> None:
    """Print names and values under each other; long values are broken between words."""
    widest = max(map(len, fields))
    for name, value in fields.items():
        text = f"{name:<{widest}}".replace(" ", _TIE) + _TIE * 2 + value
        for line in wrapped(text, width=columns(sys.stdout), indent=widest + 2):
            click.echo(line)


def quoted(prompt: str) -> str:
    """Return a prompt as one line, in quotes, with line breaks and control characters escaped."""
    import orjson

    text = orjson.dumps(prompt).decode()
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
