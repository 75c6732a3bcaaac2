"""`warmd bench` on made-up works: warmd beside the stock libraries and what the machine permits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ...jobs.bench.works import usual
from ..shared.app import App, note
from ..view import render
from ..view.live import LiveLine, has_live_lines

if TYPE_CHECKING:
    from ...jobs.bench.rows import Effort, OnProgress, Row

HEADERS = ("WORK", ">STOCK", ">WARMD", ">FASTER", ">FLOOR", ">SHARE", ">STOCK MEM", ">WARMD MEM")

Measure = Callable[[list[str], "Effort", "OnProgress"], "Iterator[Row]"]


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
    """Measure and print a row for each work, each told as soon as it is known. Raises JobFailed."""
    rows = []
    with LiveLine(enabled=has_live_lines()) as line:
        for row in measure(list(works), effort, line.draw):
            line.clear()
            if app.as_json:
                render.json_line(asdict(row))
            else:
                note(_sentence(row))
            rows.append(row)
    if not app.as_json:
        render.print_table(HEADERS, [_cells(row) for row in rows])


def _sentence(row: Row) -> str:
    """A row while the others are still measured: it may be long until the table."""
    _, stock, warmd, faster, *_ = _cells(row)
    return f"{row.work}: {warmd} beside {stock}, {faster}"


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
