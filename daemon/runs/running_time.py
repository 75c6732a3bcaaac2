"""How long the executions of a job ran, from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...jobs.event_format import TERMINAL

# The types that end an execution which has started; `paused` does if the job was released.
_ENDS = (*TERMINAL, "requeued")


def running_s(events: Iterable[Mapping[str, Any]], *, before: int) -> float:
    """Return the running time of the executions before this one, in seconds, without pauses.

    An execution runs from its `started` event to its end, or to its last event where it was killed
    with its worker. Then the time since that event is not counted.
    """
    found: dict[int, _Span] = {}
    for event in events:
        number, kind = event["execution"], event["type"]
        if number >= before:
            continue
        if kind == "started":
            found[number] = _Span(event["time"])
        elif number in found:
            found[number].add(event)
    return sum(span.seconds for span in found.values())


class _Span:
    """The running time of one execution."""

    def __init__(self, began: float) -> None:
        self.seconds = 0.0
        self._since: float | None = began  # when it last began to run; None: paused
        self._has_ended = False

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the next event of the execution."""
        if self._has_ended:
            return  # logged later, by a command
        if self._since is not None:
            self.seconds += max(event["time"] - self._since, 0.0)  # the clock may be set back
            self._since = event["time"]
        if event["type"] == "paused":
            self._since = None
            self._has_ended = bool(event.get("released"))
        elif event["type"] == "unpaused":
            self._since = event["time"]
        elif event["type"] in _ENDS:
            self._has_ended = True
