"""Streaming the text of an infer job, for `warmd run` and `warmd chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ...jobs.errors import WarmdError
from ..shared.app import EXIT_INTERRUPTED, note
from ..view import render
from ..view.wrap import WordWrap
from .watch import EXIT_CODES

if TYPE_CHECKING:
    from ...daemon.client.client import Client


def show(client: Client, job_id: str) -> tuple[str, int]:
    """Stream the job's text to stdout; return the text and the exit code of the job's end.

    On a terminal, lines are broken between words. Ctrl-C cancels the job. Errors go to stderr.
    """
    pieces: list[str] = []
    writer = _Writer()
    try:
        _write_text(client, job_id, pieces, writer)
        writer.end()
    except KeyboardInterrupt:
        writer.end()
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


def _write_text(client: Client, job_id: str, pieces: list[str], writer: _Writer) -> None:
    for piece in client.text(job_id):
        if piece is None:
            writer.end()
            note("\nThe job's process died; it starts again:")
            pieces.clear()
        else:
            pieces.append(piece)
            writer.write(piece)


class _Writer:
    """Writes streamed text to stdout: unchanged, but safe and wrapped on a terminal."""

    def __init__(self) -> None:
        self._wrap = self._new_wrap()

    def write(self, text: str) -> None:
        if self._wrap is not None:
            text = self._wrap.feed(render.printable(text))
        sys.stdout.write(text)
        sys.stdout.flush()

    def end(self) -> None:
        """Write the text that is held back; the next text starts a new line."""
        if self._wrap is not None:
            sys.stdout.write(self._wrap.flush())
            sys.stdout.flush()
            self._wrap = self._new_wrap()

    @staticmethod
    def _new_wrap() -> WordWrap | None:
        return WordWrap(lambda: render.columns(sys.stdout)) if sys.stdout.isatty() else None


def _cancel(client: Client, job_id: str) -> None:
    try:
        client.cancel(job_id)
    except WarmdError:
        return  # it has ended meanwhile
    note(f"\n{job_id} is canceled.")
