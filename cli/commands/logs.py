"""`warmd logs`: the daemon's log, or the output of a job's libraries and user code.

Reads files only, so that it works when the daemon does not.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import click

from ...jobs.errors import NotFound
from ..shared.app import App, common_options, note
from ..shared.job_argument import job_argument
from ..view import render

_POLL_S = 0.2  # between two reads of a followed file


@click.command()
@job_argument
@click.option(
    "-f", "--follow", is_flag=True, help="Follow the log: show new lines as they are written."
)
@click.option(
    "-n",
    "--lines",
    type=click.IntRange(min=0, max=10_000_000),
    default=50,
    show_default=True,
    help="Lines to show from the end of the log; 0: none.",
)
@common_options
@click.pass_obj
def logs(app: App, job: str | None, follow: bool, lines: int) -> None:
    """Show the log of the daemon or of JOB (`-`: the latest job)."""
    from ...daemon.host.home import Home

    path = Home(app.config().home).log if job is None else _job_log(app, job)
    if not path.is_file() and not follow:
        if job is None:
            raise NotFound(f"log: nothing was written to {path} yet")
        note(f"{path.parent.name} has written no log")
    for line in _read(path, lines, follow=follow):
        if app.as_json:
            render.json_line({"line": line})
        else:
            click.echo(line)


def _job_log(app: App, job: str) -> Path:
    client = app.client()
    return client.rundir(client.find(job)).log


def _read(path: Path, lines: int, *, follow: bool) -> Iterator[str]:
    """Yield the last `lines` lines, then, with `follow`, each new one, also of a rotated file."""
    position = inode = 0
    if path.is_file():
        with open(path, "rb") as file:
            last = deque(file, maxlen=lines)
            position, inode = file.tell(), os.fstat(file.fileno()).st_ino
        if follow and last and not last[-1].endswith(b"\n"):
            position -= len(last.pop())  # still being written: it comes whole, below
        yield from map(_text, last)
    while follow:
        if path.is_file():
            with open(path, "rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != inode or found.st_size < position:
                    position, inode = 0, found.st_ino
                file.seek(position)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    position += len(line)
                    yield _text(line)
        time.sleep(_POLL_S)


def _text(line: bytes) -> str:
    return line.decode(errors="replace").rstrip("\r\n")
