"""What a job's events look like: a line each, and one live line with a bar and an honest ETA."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from . import render

# Steps that the pace is judged by: enough to pass over a checkpoint, few enough to follow a change.
_RECENT = 20

# Of a step, what fits on a line; everything is in `--json`.
_STEP_FIELDS = ("loss", "reward", "reward_std", "kl", "grad_norm", "completion_length")
_HIDDEN = {"seq", "execution", "time", "type", "step", "steps_total", "traceback"}
_BAR = 20


def describe(event: Mapping[str, Any]) -> str:
    """Say what happened, on one line that begins with the time of day."""
    parts = [time.strftime("%H:%M:%S", time.localtime(event["time"])), _headline(event)]
    names = _STEP_FIELDS if event["type"] == "step" else [n for n in event if n not in _HIDDEN]
    if event["type"] == "finished":
        parts += _values(event.get("result") or {})
    parts += _values({name: event.get(name) for name in names})
    return "  ".join(parts)


def _headline(event: Mapping[str, Any]) -> str:
    step, total = event.get("step"), event.get("steps_total")
    at = f"{step}/{total}" if step is not None and total else step
    if event["type"] == "step":
        return f"step {at}"
    if event["type"] == "started":
        return f"started (execution {event['execution']})"
    return str(event["type"]) if step is None else f"{event['type']} at step {step}"


def _values(fields: Mapping[str, Any]) -> list[str]:
    """Names and values of what can be said in a word: no lists, no objects, nothing empty."""
    shown = []
    for name, value in fields.items():
        if isinstance(value, bool) or (isinstance(value, str) and value):
            shown.append(f"{name} {render.one_line(value)}")
        elif isinstance(value, int | float):
            if name == "seconds":
                shown.append(render.duration(value))
            elif name.endswith("_s"):
                shown.append(f"{name.removesuffix('_s')} {render.duration(value)}")
            elif name.endswith("bytes"):
                shown.append(render.size(value))
            else:
                shown.append(f"{name} {render.number(value)}")
    return shown


class Progress:
    """How far a job is, from its events."""

    def __init__(self) -> None:
        self.phase = "waiting"
        self.step = 0
        self.steps_total: int | None = None
        self.metrics: dict[str, float] = {}
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._execution = 0
        self._last_step_at: float | None = None

    def update(self, event: Mapping[str, Any]) -> None:
        """Take in the next event."""
        if event["execution"] != self._execution:
            self._execution = event["execution"]
            self._last_step_at = None
        self.steps_total = event.get("steps_total") or self.steps_total
        if event["type"] == "step":
            self._take_step(event)
        elif event["type"] in ("started", "begin"):
            self.phase = "starting"
        elif event["type"] == "requeued":
            self.phase = "waiting"
        elif event["type"] in render.STATUS_COLOURS:  # it ended
            self.phase = event["type"]

    def _take_step(self, event: Mapping[str, Any]) -> None:
        self.phase = "running"
        if self._last_step_at is not None:
            self._durations.append(event["time"] - self._last_step_at)
        self._last_step_at = event["time"]
        self.step = event["step"]
        metrics = {name: event.get(name) for name in ("loss", "reward")}
        self.metrics = {n: v for n, v in metrics.items() if isinstance(v, int | float)}

    @property
    def seconds_per_step(self) -> float | None:
        """The median of the recent steps, or None before the second step of an execution."""
        return statistics.median(self._durations) if self._durations else None

    def eta_s(self, now: float) -> float | None:
        """Seconds until the last step at the recent pace, or None where nobody can know."""
        pace = self.seconds_per_step
        if pace is None or self.steps_total is None or self._last_step_at is None:
            return None
        left = pace * (self.steps_total - self.step)
        return max(left - (now - self._last_step_at), 0.0)

    def line(self, now: float, width: int) -> str:
        """Draw the live line, with as much on it as `width` allows."""
        if self.steps_total is None or self.phase not in ("starting", "running"):
            return self.phase[: width - 1]
        eta_s = self.eta_s(now)
        parts = [f"{self.step}/{self.steps_total}"]
        if eta_s is not None:
            parts.append(f"ETA {render.duration(eta_s)}")
            parts.append(f"done at {render.clock(now + eta_s, now=now)}")
        elif self.phase != "running":
            parts.append(self.phase)
        parts += [f"{name} {render.number(value)}" for name, value in self.metrics.items()]
        if self.seconds_per_step is not None:
            parts.append(f"{render.duration(self.seconds_per_step)}/step")
        line = _bar(self.step / self.steps_total)
        for part in parts:
            if len(line) + 2 + len(part) >= width:
                break
            line += "  " + part
        return line[: width - 1]


def _bar(share: float) -> str:
    full = round(min(share, 1.0) * _BAR)
    return "█" * full + "░" * (_BAR - full)
