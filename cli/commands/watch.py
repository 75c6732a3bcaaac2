"""`warmd tail`: follow a job from its first event to its end; also what `submit --wait` does."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any, TextIO

import click

from ...jobs.errors import SpecError
from ...jobs.ids import kind_of
from ..shared.app import EXIT_INTERRUPTED, App, common_options, note
from ..shared.job_argument import job_argument
from ..view import render
from ..view.describe import describe
from ..view.live import LiveLine, has_live_lines
from ..view.progress import Progress
from .samples import completion_lines
from .show import answers_of

if TYPE_CHECKING:
    from ...daemon.client.client import Client

_TROUBLE = ("stall", "divergence", "save_failed", "warning")  # events that need attention

EXIT_CODES = {"finished": 0, "failed": 1, "stopped": 4, "canceled": 4}


@click.command()
@job_argument
@click.option("--samples", is_flag=True, help="Show completions of each GRPO step as well.")
@click.option(
    "-n",
    "newest",
    metavar="N",
    type=click.IntRange(min=0),
    help="Number of past events to show before following, the newest ones.  [default: all]",
)
@common_options
@click.pass_obj
def tail(app: App, job: str | None, samples: bool, newest: int | None) -> int:
    """Follow JOB until it ends.

    Shows all events of the job, from the first. JOB can also be a sweep or a curriculum. Ctrl-C
    leaves it running. Exit code: 0 finished, 1 failed, 4 stopped.
    """
    client = app.reader()
    job_id = client.groups.find_any(job)
    kind = kind_of(job_id)
    for name, is_given in (("samples", samples), ("n", newest is not None)):
        if is_given and kind in ("curriculum", "sweep"):
            raise SpecError(name, f"must go with a job, got a {kind}")
    if app.decline and (kind in ("curriculum", "sweep") or not _has_ended(client, job_id)):
        app.decline()
    if job_id.startswith("curriculum-"):
        from .curriculum import follow_curriculum

        return follow_curriculum(app, client, job_id, follow)
    if job_id.startswith("sweep-"):
        from .sweep import follow as follow_sweep

        return follow_sweep(app, client, job_id)
    return follow(app, client, job_id, sys.stdout, has_samples=samples, newest=newest)


def _has_ended(client: Client, job_id: str) -> bool:
    return client.jobs.get(job_id)["status"] in EXIT_CODES


def follow(
    app: App,
    client: Client,
    job_id: str,
    stream: TextIO,
    *,
    has_samples: bool = False,
    newest: int | None = None,
) -> int:
    """Show the events of a job on `stream` until it ends; return the exit code of its end.

    With --json every event is a line on stdout. On a terminal a live line on stderr replaces the
    events of steps, rows and pieces of text. `newest`: number of past events to show; None: all.
    """
    live = LiveLine(enabled=not app.as_json and stream.isatty() and has_live_lines())
    try:
        with live:
            hidden = _hidden(client, job_id, newest)
            _show_events(app, client, job_id, stream, live, has_samples=has_samples, hidden=hidden)
    except KeyboardInterrupt:
        if not live.enabled:
            note("")  # the terminal printed ^C without a line break
        note(f"{job_id} continues. Follow it again with: {app.command(f'tail {job_id}')}")
        return EXIT_INTERRUPTED
    return EXIT_CODES.get(client.jobs.get(job_id)["status"], 0)


def wait(client: Client, job_id: str) -> str:
    """Wait until a job ends, showing only a live line on a terminal; return its status."""
    progress = Progress()
    with LiveLine(enabled=has_live_lines()) as live:
        for event in client.jobs.follow(job_id):
            if event is not None:
                progress.update(event)
            if live.enabled:
                live.draw(_line(client, job_id, progress, is_silent=event is None))
    status: str = client.jobs.get(job_id)["status"]
    return status


def _show_events(
    app: App,
    client: Client,
    job_id: str,
    stream: TextIO,
    live: LiveLine,
    *,
    has_samples: bool,
    hidden: int,
) -> None:
    """Show the events of a job whose `seq` is greater than `hidden`."""
    progress = Progress()
    for event in client.jobs.follow(job_id):
        if event is not None and event["seq"] <= hidden:
            progress.update(event)
        elif event is not None and app.as_json:
            render.json_line(event)
        elif event is not None:
            progress.update(event)
            if not _is_live(event) or (event["type"] != "text" and not live.enabled):
                live.clear()
                click.echo(_lines(event, stream), file=stream)
                _show_answer(event, stream)
            if has_samples and event.get("samples"):
                live.clear()
                if live.enabled:
                    click.echo(_lines(event, stream), file=stream)
                for line in completion_lines(event["samples"], width=render.columns(stream)):
                    click.echo(line, file=stream)
        if live.enabled:
            live.draw(_line(client, job_id, progress, is_silent=event is None))


def _hidden(client: Client, job_id: str, newest: int | None) -> int:
    """Return the `seq` of the last past event that is not shown; 0: all are shown."""
    if newest is None:
        return 0
    from ...daemon.runs import events

    return max(0, events.last_seq(client.rundir(job_id).events) - newest)


def _is_live(event: dict[str, Any]) -> bool:
    """Whether the live line shows the event."""
    return event["type"] in ("step", "progress", "text")


def _show_answer(event: dict[str, Any], stream: TextIO) -> None:
    """Show the completed texts of an infer job."""
    if event["type"] == "finished":
        for text in answers_of(event.get("result") or {}):
            click.echo(text, file=stream)


def _line(client: Client, job_id: str, progress: Progress, *, is_silent: bool) -> str:
    if is_silent and progress.phase == "waiting":
        return waiting_line(client.jobs.get(job_id), now=client.now())
    return progress.line(client.now(), shutil.get_terminal_size().columns)


def waiting_line(job: dict[str, Any], *, now: float) -> str:
    """The live line of a job that has not begun: its status, its waiting time and the reason."""
    since = job["created_at"]
    line = str(job["status"])
    if job["paused"]:
        line, since = "paused", job["paused_at"]
    if since is not None:
        line += f" for {render.duration(now - since)}"
    if job["position"] is not None:
        line += f", position {job['position']} in {job['queue']}"
    if job["steps_total"]:
        line += f", {job['steps_total']} steps"
    if job["after"]:
        line += f", after {', '.join(job['after'])}"
    return line


def _lines(event: dict[str, Any], stream: TextIO) -> str:
    """An event in words, in the width of the terminal."""
    at, *parts = describe(event).split("  ")
    text = render.phrase("  ".join([at, ""])) + "  ".join(map(render.phrase, parts))
    lines = render.wrapped(text, width=render.columns(stream), indent=len(at) + 2)
    color = "yellow" if event["type"] in _TROUBLE else render.STATUS_COLORS.get(event["type"])
    return "\n".join(click.style(line, fg=color) if color else line for line in lines)
