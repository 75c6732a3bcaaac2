"""Streaming the text of an infer job, for `warmd run` and `warmd chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ...jobs.errors import WarmdError
from ..shared.app import EXIT_INTERRUPTED, note
from ..view import render
from .watch import EXIT_CODES

if TYPE_CHECKING:
    from ...daemon.client.client import Client


def show(client: Client, job_id: str) -> tuple[str, int]:
    """Stream the job's text to stdout; return the text and the exit code of the job's end.

    Ctrl-C cancels the job. Errors go to stderr.
    """
    pieces: list[str] = []
    try:
        _write_text(client, job_id, pieces)
    except KeyboardInterrupt:
        _cancel(client, job_id)
        code = EXIT_INTERRUPTED
    else:
        job = client.job(job_id)
        code = EXIT_CODES.get(job["status"], 0)
        if code:
            note(f"{job_id}: {job['status']}: {render.one_line(job['error'] or 'no reason given')}")
    text = "".join(pieces)
    if text and not text.endswith("\n"):
        click.echo()
    return text, code


def _write_text(client: Client, job_id: str, pieces: list[str]) -> None:
    for event in client.follow(job_id):
        if event is None:
            continue
        if event["type"] == "begin" and pieces:
            note("\nThe job's process died; it starts again:")
            pieces.clear()
        elif event["type"] == "text" and event["index"] == 0:
            pieces.append(event["text"])
            _write(event["text"])


def _write(text: str) -> None:
    if sys.stdout.isatty():
        text = render.printable(text)
    sys.stdout.write(text)
    sys.stdout.flush()


def _cancel(client: Client, job_id: str) -> None:
    try:
        client.cancel(job_id)
    except WarmdError:
        return  # it has ended meanwhile
    note(f"\n{job_id} is canceled.")
