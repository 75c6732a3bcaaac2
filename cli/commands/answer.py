"""Streaming the answer of an infer job, for `warmd run` and `warmd chat`."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click

from ...jobs.errors import WarmdError
from ..shared.app import EXIT_INTERRUPTED, note
from ..view import render
from ..view.wrap import WordWrap
from .watch import EXIT_CODES

if TYPE_CHECKING:
    from ...daemon.client.client import Client


@dataclass
class Answer:
    """What a job has answered: its text, and its tool calls with `id`, `name` and `arguments`."""

    text: str = ""
    calls: list[dict[str, str]] = field(default_factory=list)


def show(client: Client, job_id: str) -> tuple[Answer, int]:
    """Stream the job's answer to stdout; return it and the exit code of the job's end.

    On a terminal, lines are broken between words and thinking is dimmed; elsewhere thinking goes to
    stderr. A tool call is a line. Ctrl-C cancels the job. Errors go to stderr.
    """
    answer = Answer()
    writer = _Writer()
    try:
        _write(client, job_id, answer, writer)
        writer.end()
    except KeyboardInterrupt:
        writer.end()
        _cancel(client, job_id)
        code = EXIT_INTERRUPTED
    else:
        job = client.jobs.get(job_id)
        code = EXIT_CODES.get(job["status"], 0)
        if code:
            note(f"{job_id}: {job['status']}: {render.one_line(job['error'] or 'no reason given')}")
    writer.end_line()
    return answer, code


def _write(client: Client, job_id: str, answer: Answer, writer: _Writer) -> None:
    for event in client.jobs.text_events(job_id):
        if event is None:
            writer.end()
            note("\nThe job's process died; it starts again:")
            answer.text, answer.calls = "", []
            continue
        writer.write(event.get("reasoning", ""), is_thought=True)
        writer.write(event["text"])
        answer.text += event["text"]
        for call in event.get("calls", ()):
            writer.end_line()
            writer.write(f"{call['name']} {call['arguments']}\n")
            answer.calls.append(call)


class _Writer:
    """Writes streamed text to stdout: unchanged, but safe and wrapped on a terminal."""

    def __init__(self) -> None:
        self._wrap = self._new_wrap()
        self._is_thought = False
        self._is_in_line = False  # whether the latest line has text, and no end

    def write(self, text: str, *, is_thought: bool = False) -> None:
        if not text:
            return
        if is_thought != self._is_thought:
            self.end_line()
            self._is_thought = is_thought
        self._is_in_line = not text.endswith("\n")
        if self._wrap is not None:
            text = self._wrap.feed(render.printable(text))
        self._put(text)

    def end(self) -> None:
        """Write the text that is held back; the next text starts a new line."""
        if self._wrap is not None:
            self._put(self._wrap.flush())
            self._wrap = self._new_wrap()

    def end_line(self) -> None:
        """End a line that has text."""
        self.end()
        if self._is_in_line:
            self._put("\n")
            self._is_in_line = False

    def _put(self, text: str) -> None:
        if self._is_thought:
            text = click.style(text, dim=True) if text.strip() else text
            click.echo(text, nl=False, err=self._wrap is None)
        else:
            sys.stdout.write(text)
            sys.stdout.flush()

    @staticmethod
    def _new_wrap() -> WordWrap | None:
        return WordWrap(lambda: render.columns(sys.stdout)) if sys.stdout.isatty() else None


def _cancel(client: Client, job_id: str) -> None:
    try:
        client.jobs.cancel(job_id)
    except WarmdError:
        return  # it has ended meanwhile
    note(f"\n{job_id} is canceled.")
