"""Showing the text of an infer job while it is written; `warmd run` and `warmd chat` do it."""

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

_ERASED = dict.fromkeys([*range(9), *range(11, 32), 127, *range(128, 160)])


def show(client: Client, job_id: str) -> tuple[str, int]:
    """Write the job's text to stdout as it comes; return it, and the exit code of the job's end.

    Ctrl-C cancels the job. What went wrong is told on stderr.
    """
    said: list[str] = []
    try:
        _write_text(client, job_id, said)
    except KeyboardInterrupt:
        _cancel(client, job_id)
        code = EXIT_INTERRUPTED
    else:
        job = client.job(job_id)
        code = EXIT_CODES.get(job["status"], 0)
        if code:
            note(f"{job_id}: {job['status']}: {render.one_line(job['error'] or 'no reason given')}")
    text = "".join(said)
    if text and not text.endswith("\n"):
        click.echo()
    return text, code


def _write_text(client: Client, job_id: str, said: list[str]) -> None:
    for event in client.follow(job_id):
        if event is None:
            continue
        if event["type"] == "begin" and said:
            note("\nIts process died. It is begun again:")
            said.clear()
        elif event["type"] == "text" and event["index"] == 0:
            said.append(event["text"])
            _write(event["text"])


def _write(text: str) -> None:
    if sys.stdout.isatty():
        text = text.translate(_ERASED)  # a model may have learnt to command terminals
    sys.stdout.write(text)
    sys.stdout.flush()


def _cancel(client: Client, job_id: str) -> None:
    try:
        client.cancel(job_id)
    except WarmdError:
        return  # it has ended meanwhile
    note(f"\n{job_id} is canceled.")
