"""The progress of a model that a command fetches from the run store, on stderr."""

from __future__ import annotations

import click

from . import render
from .live import LiveLine, has_live_lines


class FetchProgress:
    """A line for each model, and on a terminal how much of it is here."""

    def __init__(self) -> None:
        self._line = LiveLine(enabled=has_live_lines())
        self._what = ""
        self._total = 0
        self._bytes = 0

    def begin(self, job_id: str, total_bytes: int) -> None:
        self._what = f"fetching the model of {job_id}"
        self._total, self._bytes = total_bytes, 0
        click.echo(f"{self._what}: {render.size(total_bytes)}", err=True)

    def advance(self, number: int) -> None:
        self._bytes += number
        if self._bytes < self._total:
            self._line.draw(f"{self._what}: {self._bytes / self._total:.0%}")
        else:
            self._line.clear()
