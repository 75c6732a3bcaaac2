"""How long the executions of a job ran, from its events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ...jobs.event_format import TERMINAL

# The types that end an execution which has started; `paused` does if the job was released.
_ENDS = (*TERMINAL, "requeued")
_IDLE = ("paused", "waiting")
_BUSY = {"unpaused": "paused", "waited": "waiting"}  # the types that end a pause or a wait


def running_s(events: Iterable[Mapping[str, Any]], *, before: int) -> float:
    """Return the running time of the executions before this one, in seconds.

    Pauses do not count, nor waits for a full disk. An execution runs from its `started` event to
    its end, or to its last event where it was killed with its worker: then the time since that
    event is not counted.
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
        self._latest = began  # the time of its latest event
        self._idle: set[str] = set()  # why its time does not count
        self._has_ended = False

    def add(self, event: Mapping[str, Any]) -> None:
        """Add the next event of the execution."""
        if self._has_ended:
            return  # logged later, by a command
        if not self._idle:
            self.seconds += max(event["time"] - self._latest, 0.0)  # the clock may be set back
        self._latest, kind = event["time"], event["type"]
        if kind in _IDLE:
            self._idle.add(kind)
        elif kind in _BUSY:
            self._idle.discard(_BUSY[kind])
        self._has_ended = kind in _ENDS or bool(kind == "paused" and event.get("released"))
