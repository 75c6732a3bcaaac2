"""`warmd plot`: curves of jobs in the terminal, as a PNG file, or as numbers.

Reads the event logs: needs no daemon.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ...daemon.runs.curves import FEWEST_SMOOTHED, Curve, chosen, curves_of, smoothed, span_of
from ...jobs.errors import SpecError
from ..shared.app import App, common_options, note
from ..shared.given import GivenPath
from ..shared.job_argument import complete_job
from ..shared.names import names_of
from ..view import render
from ..view.chart import chart, key

if TYPE_CHECKING:
    from ...daemon.client.client import Client

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
    help="Metric to plot: a field of the events, such as loss, grad_norm or eval_mlm_acc. May be "
    "repeated.  [default: loss, reward and accuracies]",
)
@click.option(
    "--png",
    type=GivenPath(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a PNG file instead; needs pip install 'warmd[plot]'.",
)
@click.option(
    "--smooth",
    type=click.IntRange(min=1, max=10_000_000),
    metavar="N",
    help="Length of the moving average in points; the raw curve is drawn faintly behind it. "
    "1: only the raw curve.  [default: a twentieth of the points; 1 for evaluations and below "
    f"{FEWEST_SMOOTHED} points]",
)
@common_options
@click.pass_obj
def plot(
    app: App,
    jobs: tuple[str, ...],
    metrics: tuple[str, ...],
    png: Path | None,
    smooth: int | None,
) -> None:
    """Plot the curves of JOB, or compare several."""
    from ...daemon.runs import events

    client = app.client()
    found = {}
    for job in dict.fromkeys(_jobs_of(client, jobs)):
        found[job] = curves_of(job, events.read(client.rundir(job).events))
    available = dict.fromkeys(name for curves in found.values() for name in curves)
    wanted = [
        [curves[name] for curves in found.values() if name in curves]
        for name in chosen(metrics, available)
    ]
    if png is not None:
        _write_png(wanted, names_of(client, found), png, smooth)
        note(f"wrote {png}")
    if app.as_json:
        for curve in (curve for curves in wanted for curve in curves):
            render.json_line(curve.__dict__)
    elif png is None:
        names = names_of(client, found)
        for curves in wanted:
            click.echo("\n".join(_drawn(app, curves, names, smooth)))


def _jobs_of(client: Client, jobs: Sequence[str]) -> Iterator[str]:
    """The ids of jobs; for a curriculum those of its trainings, for a sweep all."""
    for job in jobs or (None,):
        found = client.groups.find_any(job, is_training=True)
        if found.startswith("curriculum-"):
            yield from (attempt["job"] for attempt in client.groups.curriculum(found)["attempts"])
        elif found.startswith("sweep-"):
            yield from client.groups.sweep_members(found)
        else:
            yield found


def _drawn(
    app: App, curves: Sequence[Curve], names: Mapping[str, str], smooth: int | None
) -> list[str]:
    """One metric: a line with its name and latest values, its chart, and a legend."""
    is_terminal = sys.stdout.isatty()
    in_color = is_terminal and app.color is not False
    width = max(shutil.get_terminal_size().columns if is_terminal else _WIDTH, _LEAST_WIDTH)
    spans = [smooth or span_of(curve) for curve in curves]
    pairs = list(zip(curves, spans, strict=True))
    lines = [(curve.steps, smoothed(curve.values, span)) for curve, span in pairs]
    raw = [(curve.steps, curve.values) for curve in curves] if max(spans) > 1 else []
    title = curves[0].metric
    if len(curves) == 1:
        title += f"  {_latest(curves[0])}  {names[curves[0].job]}"
    if raw:
        title += f"  (smoothed over {max(spans)} steps)"
    drawn = [click.style(title[:width], bold=True)]
    drawn += chart(lines, width=width, height=_HEIGHT, in_color=in_color, faint=raw)
    if len(curves) > 1:
        drawn += [
            key(f"{names[curve.job]}  {_latest(curve)}"[: width - 2], number, in_color=in_color)
            for number, curve in enumerate(curves)
        ]
    return drawn


def _latest(curve: Curve) -> str:
    return f"{render.number(curve.values[-1])} at step {curve.steps[-1]}"


def _write_png(
    wanted: Sequence[Sequence[Curve]], names: Mapping[str, str], path: Path, smooth: int | None
) -> None:
    """Write one PNG file, a chart for each metric. Raises SpecError without matplotlib."""
    from io import BytesIO

    from ...jobs.files import umask
    from ...jobs.files.atomic import write_atomic

    figure_class = _figure_class()
    figure = figure_class(figsize=(9, 3.2 * len(wanted)), layout="constrained")
    for axes, curves in zip(figure.subplots(len(wanted), squeeze=False)[:, 0], wanted, strict=True):
        for curve in curves:
            marker = "o" if len(curve.steps) < 30 else None
            span = smooth or span_of(curve)
            values = smoothed(curve.values, span)
            label = names[curve.job]
            (line,) = axes.plot(curve.steps, values, label=label, marker=marker, markersize=3)
            if span > 1:
                axes.plot(curve.steps, curve.values, color=line.get_color(), alpha=0.25)
        axes.set_ylabel(curves[0].metric)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    png = BytesIO()
    figure.savefig(png, format="png", dpi=120)
    write_atomic(path, png.getvalue(), mode=umask.file_mode())


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SpecError(
            "png", "needs matplotlib, which is not installed: pip install 'warmd[plot]'"
        ) from error
    return Figure
