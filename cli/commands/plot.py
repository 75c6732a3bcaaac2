"""`warmd plot`: the curves of jobs in the terminal, in a picture, or as numbers.

They come from the event logs alone: no server and no daemon is needed.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ...jobs.errors import SpecError
from ..shared.app import App, common_options, note
from ..shared.job_argument import complete_job
from ..view import render
from ..view.chart import chart, key
from ..view.curves import Curve, chosen, curves_of

_WIDTH = 80  # where there is no terminal
_LEAST_WIDTH = 20
_HEIGHT = 13  # rows of a chart, its x axis left out


@click.command()
@click.argument("jobs", nargs=-1, metavar="[JOB]...", shell_complete=complete_job)
@click.option(
    "--metric",
    "metrics",
    multiple=True,
    metavar="NAME",
    help="A field of the events, such as loss, grad_norm or eval_mlm_acc. May be repeated.  "
    "[default: loss, reward and accuracies]",
)
@click.option(
    "--png",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a picture instead; needs warmd[plot].",
)
@common_options
@click.pass_obj
def plot(app: App, jobs: tuple[str, ...], metrics: tuple[str, ...], png: Path | None) -> None:
    """Draw the curves of JOB, or of several to compare them."""
    from ...daemon.runs import events

    client = app.client()
    found = {}
    for job in dict.fromkeys(client.find(job) for job in jobs or (None,)):
        found[job] = curves_of(job, events.read(client.rundir(job).events))
    available = dict.fromkeys(name for curves in found.values() for name in curves)
    wanted = [
        [curves[name] for curves in found.values() if name in curves]
        for name in chosen(metrics, available)
    ]
    if png is not None:
        _write_png(wanted, png)
        note(f"wrote {png}")
    if app.as_json:
        for curve in (curve for curves in wanted for curve in curves):
            render.json_line(curve.__dict__)
    elif png is None:
        for curves in wanted:
            click.echo("\n".join(_drawn(app, curves)))


def _drawn(app: App, curves: Sequence[Curve]) -> list[str]:
    """One metric: a line with its name and latest values, its chart, and whose line is which."""
    is_terminal = sys.stdout.isatty()
    in_colour = is_terminal and app.color is not False
    width = max(shutil.get_terminal_size().columns if is_terminal else _WIDTH, _LEAST_WIDTH)
    lines = [(curve.steps, curve.values) for curve in curves]
    title = curves[0].metric
    if len(curves) == 1:
        title += f"  {_latest(curves[0])}  {curves[0].job}"
    drawn = [click.style(title[:width], bold=True)]
    drawn += chart(lines, width=width, height=_HEIGHT, in_colour=in_colour)
    if len(curves) > 1:
        drawn += [
            key(f"{curve.job}  {_latest(curve)}"[: width - 2], number, in_colour=in_colour)
            for number, curve in enumerate(curves)
        ]
    return drawn


def _latest(curve: Curve) -> str:
    return f"{render.number(curve.values[-1])} at step {curve.steps[-1]}"


def _write_png(wanted: Sequence[Sequence[Curve]], path: Path) -> None:
    """Write one picture, a chart for each metric. Raises SpecError without matplotlib."""
    from io import BytesIO

    from ...jobs.files.atomic import write_atomic

    figure_class = _figure_class()
    figure = figure_class(figsize=(9, 3.2 * len(wanted)), layout="constrained")
    for axes, curves in zip(figure.subplots(len(wanted), squeeze=False)[:, 0], wanted, strict=True):
        for curve in curves:
            marker = "o" if len(curve.steps) < 30 else None
            axes.plot(curve.steps, curve.values, label=curve.job, marker=marker, markersize=3)
        axes.set_ylabel(curves[0].metric)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=120)
    write_atomic(path, picture.getvalue(), mode=0o644)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpecError(
            "png", "needs matplotlib, which is not installed: pip install 'warmd[plot]'"
        ) from error
    return Figure
