"""Progress of a job and an estimate of its end, from its events."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from . import events

# Steps whose median counts: enough to ignore a slow one, few enough to follow a change.
_RECENT = 20


class Estimate:
    """Progress of a job, and the estimate of its end.

    The time per step is the median of the recent steps, without the evaluations and checkpoints
    between them. These have their own share in the ETA: their time so far, spread over the steps up
    to the latest of them.
    """

    def __init__(self) -> None:
        self.phase = "waiting"
        self.step = 0
        self.steps_total: int | None = None
        self.micro_steps: int | None = None  # of a kind that counts them, where there are several
        self.micro_steps_total: int | None = None
        self.rows_done: int | None = None  # of a file of prompts or texts
        self.rows_total: int | None = None
        self.unit = "records"
        self.activity: str | None = None  # its activity before the first step
        self.phase_began: float | None = None
        self.metrics: dict[str, float] = {}
        self._rows: deque[tuple[float, int]] = deque(maxlen=_RECENT)  # done at a time
        self._durations: deque[tuple[int, float]] = deque(maxlen=_RECENT)  # with the step they end
        self._between: dict[tuple[int, str], float] = {}  # seconds after a step, by what took them
        self._execution = 0
        self._first_step: int | None = None  # that was seen
        self._last_step_at: float | None = None  # of this execution, with no pause since
        self._known: tuple[int, float] | None = None  # a step that had ended at a time

    def update(self, event: Mapping[str, Any]) -> None:
        """Process the next event."""
        if event["execution"] != self._execution:
            self._execution = event["execution"]
            self._last_step_at = self._known = None
        self.steps_total = event.get("steps_total") or self.steps_total
        self.micro_steps_total = event.get("micro_steps_total") or self.micro_steps_total
        kind = event["type"]
        if kind in ("started", "begin"):
            self.activity = None
            self._rows.clear()
            self.phase_began = event["time"]
            self.rows_done, self.rows_total = event.get("done"), event.get("rows")
        if kind == "step":
            self._take_step(event)
        elif kind == "started":
            self.phase = "starting"
        elif kind == "begin":
            self.phase = "starting"
            # The steps since the checkpoint are computed again, without events.
            self._known = (event.get("resumed_from") or 0, event["time"])
        elif kind == "progress":
            self._take_progress(event)
        elif kind == "requeued":
            self.phase = "waiting"
        elif kind == "paused":
            self.phase = "paused"
            self._last_step_at = self._known = None
        elif kind == "unpaused":
            self.phase = "running"
            self._known = (self.step, event["time"])
        elif kind == "eval" and event.get("phase", "during") == "during":
            self._take_between(event, event.get("seconds"))
        elif kind == "checkpoint":
            self._take_between(event, event.get("blocked_s"))
        elif kind in events.TERMINAL:
            self.phase = kind

    def _take_step(self, event: Mapping[str, Any]) -> None:
        self.phase = "running"
        if self._last_step_at is not None:
            self._durations.append((event["step"], event["time"] - self._last_step_at))
        self._last_step_at = event["time"]
        self._known = (event["step"], event["time"])
        self.step = event["step"]
        if self._first_step is None:
            self._first_step = self.step
        self.micro_steps = event.get("micro_steps")
        metrics = {name: event.get(name) for name in ("loss", "reward")}
        self.metrics = {n: v for n, v in metrics.items() if isinstance(v, int | float)}

    def _take_progress(self, event: Mapping[str, Any]) -> None:
        """Process a progress event: records of a file, or of the activity before the steps."""
        activity = event.get("activity")
        if activity is None:
            self.phase = "running"
        elif activity != self.activity:
            self._rows.clear()
            self.phase_began = event["time"]
        self.activity = activity
        self.unit = event.get("unit", "records")
        self.rows_done, self.rows_total = event.get("done"), event.get("total")
        if self.rows_done is not None:
            self._rows.append((event["time"], self.rows_done))

    @property
    def rows_per_s(self) -> float | None:
        """Records per second of the latest progress events; None before the second one."""
        if len(self._rows) < 2:
            return None
        (began, first), (ended, last) = self._rows[0], self._rows[-1]
        return (last - first) / (ended - began) if ended > began and last > first else None

    def _take_between(self, event: Mapping[str, Any], seconds: float | None) -> None:
        if seconds is not None and event.get("step"):
            self._between[event["step"], event["type"]] = seconds

    @property
    def seconds_per_step(self) -> float | None:
        """The median time of the recent steps; None before the second one of an execution."""
        return statistics.median(self._step_times()) if self._durations else None

    @property
    def step_range_s(self) -> tuple[float, float] | None:
        """The first and the last decile of these times; None as for the median."""
        times = sorted(self._step_times())
        if not times:
            return None
        cut = len(times) // 10
        return times[cut], times[-1 - cut]

    def _step_times(self) -> list[float]:
        """The times of the recent steps, without the evaluations and checkpoints between them."""
        after: dict[int, float] = {}
        for (step, _), seconds in self._between.items():
            after[step] = after.get(step, 0.0) + seconds
        return [max(seconds - after.get(step - 1, 0.0), 0.0) for step, seconds in self._durations]

    @property
    def seconds_between_steps(self) -> float:
        """The time that evaluations and checkpoints add to a step, on average so far."""
        if not self._between or self._first_step is None:
            return 0.0
        latest = max(step for step, _ in self._between)
        return sum(self._between.values()) / max(latest - self._first_step + 1, 1)

    def eta_s(self, now: float) -> float | None:
        """Return the seconds until the last step or row at the recent rate, None if unknown.

        The estimate is constant while a step takes longer than usual, and if the clock was set back
        since the last step.
        """
        rate = self.rows_per_s
        if rate is not None and self.rows_total is not None and self.activity is None:
            at, done = self._rows[-1]
            return max((self.rows_total - done) / rate - (now - at), 0.0)
        step_s = self.seconds_per_step
        if step_s is None or self.steps_total is None or self._known is None:
            return None
        step, at = self._known
        step_s += self.seconds_between_steps
        left = step_s * (self.steps_total - step)
        since = max(now - at, 0.0)
        return max(left - min(since, step_s * max(self.step - step + 1, 1)), 0.0)
