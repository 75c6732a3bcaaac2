"""`warmd bench` on made-up works: warmd beside the stock libraries and what the machine permits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ..jobs.bench.works import usual
from . import render
from .app import App
from .live import LiveLine, has_live_lines

if TYPE_CHECKING:
    from ..jobs.bench.rows import Effort, Row, Told

HEADERS = ("WORK", ">STOCK", ">WARMD", ">FASTER", ">FLOOR", ">SHARE", ">STOCK MEM", ">WARMD MEM")

Measure = Callable[[list[str], "Effort", "Told"], "Iterator[Row]"]


def work_options(works: Mapping[str, object], *, pairs: int) -> list[click.Parameter]:
    """Return the options that say what is measured, and how often by default."""
    return [
        click.Option(
            ["--work"],
            type=click.Choice(list(works)),
            multiple=True,
            help=f"What to measure; may be repeated.  [default: {', '.join(usual(works))}]",
        ),
        click.Option(
            ["--pairs"],
            type=click.IntRange(min=1),
            default=pairs,
            show_default=True,
            metavar="N",
            help="How often both sides are measured, in turn.",
        ),
        click.Option(
            ["--threads"],
            type=click.IntRange(min=1),
            metavar="N",
            help="Threads of both sides.  [default: as many as torch takes]",
        ),
    ]


def show(app: App, measure: Measure, works: Sequence[str], effort: Effort) -> None:
    """Measure and print a row for each work. Raises JobFailed."""
    with _telling() as told:
        rows = []
        for row in measure(list(works), effort, told):
            if app.as_json:
                render.json_line(asdict(row))
            rows.append(row)
    if not app.as_json:
        render.print_table(HEADERS, [_cells(row) for row in rows])


@contextmanager
def _telling() -> Iterator[Told]:
    """Give a function that shows what is being done, in one line of a terminal."""
    with LiveLine(enabled=has_live_lines()) as line:
        yield line.draw


def _cells(row: Row) -> list[str]:
    return [
        row.work,
        *(f"{value:.3g} {row.unit}" for value in (row.stock, row.warmd)),
        f"{row.faster:.2f}x",
        f"{row.floor:.3g} {row.unit}",
        f"{row.share:.0%}",
        render.size(row.stock_private_bytes),
        render.size(row.warmd_private_bytes),
    ]
