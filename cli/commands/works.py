"""`warmd bench` on synthetic work: warmd compared with the stock libraries and with the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ...configs.gpus import AUTO
from ...jobs.bench.works import usual
from ..shared.app import App, note
from ..view import render
from ..view.live import ClockLine, has_live_lines

if TYPE_CHECKING:
    from ...jobs.bench.rows import Effort, OnProgress, Row

HEADERS = ("WORK", ">STOCK", ">WARMD", ">FASTER", ">FLOOR", ">SHARE", ">STOCK MEM", ">WARMD MEM")

Measure = Callable[[list[str], "Effort", "OnProgress"], "Iterator[Row]"]


def work_options(works: Mapping[str, object], *, pairs: int) -> list[click.Parameter]:
    """Return the options that select works and the number of pairs."""
    return [
        click.Option(
            ["--work"],
            type=click.Choice(list(works)),
            multiple=True,
            help=f"Workload to measure. May be repeated.  [default: {', '.join(usual(works))}]",
        ),
        click.Option(
            ["--pairs"],
            type=click.IntRange(min=1, max=10_000),
            default=pairs,
            show_default=True,
            metavar="N",
            help="Number of measurements per side, alternating.",
        ),
        click.Option(
            ["--threads"],
            type=click.IntRange(min=1, max=10_000),
            metavar="N",
            help="Compute threads of both sides.  [default: torch's default]",
        ),
        click.Option(
            ["--device"],
            default=AUTO,
            show_default=True,
            metavar="DEVICE",
            help="Device of both sides: auto (the first GPU, else the CPU), cpu, cuda:N or a UUID.",
        ),
    ]


def show(app: App, measure: Measure, works: Sequence[str], effort: Effort) -> None:
    """Measure each work and print its row at once, then all in a table. Raises JobFailed."""
    rows = []
    with ClockLine(enabled=has_live_lines()) as line:
        for row in measure(list(works), effort, line.show):
            line.show("")
            if app.as_json:
                render.json_line(asdict(row))
            else:
                note(_sentence(row))
            rows.append(row)
    if not app.as_json:
        render.print_table(HEADERS, [_cells(row) for row in rows])


def _sentence(row: Row) -> str:
    """One row in words, printed while other rows are still being measured."""
    _, stock, warmd, faster, *_ = _cells(row)
    return f"{row.work}: {warmd} against {stock}, {faster}"


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
