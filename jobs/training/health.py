"""Detection of divergence (a growing loss) and of stalls (a step that does not end).

The training loop feeds both. Imports no torch.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..context import Activity

DIVERGES_BY = 3.0  # times the median
LOSSES = 100  # steps whose median a loss is compared with
FEWEST_LOSSES = 10  # before any is judged

STALLS_BY = 10.0  # times the median
DURATIONS = 32  # whose median a duration is compared with
FEWEST_DURATIONS = 5  # before any is judged by them
SHORTEST_STALL_S = 5.0
UNKNOWN_STALL_S = 600.0  # if fewer durations are known


class Divergence:
    """Detects a metric that exceeds three times its moving median.

    A metric diverges above 3 x max(median, scale). `scales` names the watched metrics with their
    scales: the magnitude from which on a value is significant. The median alone is no measure for
    a metric around 0, such as the loss of GRPO on new completions, or of an MLM that has learned
    its data. Values that are None, NaN or Inf are ignored.
    """

    def __init__(self, scales: Mapping[str, float]) -> None:
        self.scales = dict(scales)
        self._past: dict[str, deque[float]] = {name: deque(maxlen=LOSSES) for name in scales}
        self._is_on = False  # whether a divergence was reported and has not ended

    def update(self, metrics: Mapping[str, Any]) -> dict[str, Any] | None:
        """Add the metrics of a step; return the fields of a `divergence` event when one begins.

        Reported once, and again only after a step without divergence. The fields are `metric`,
        its `value` and the `median` of earlier steps.
        """
        alarms = []
        for name, scale in self.scales.items():
            value = metrics.get(name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            past = self._past[name]
            median = statistics.median(past) if len(past) >= FEWEST_LOSSES else math.inf
            if value > DIVERGES_BY * max(median, scale):
                alarms.append({"metric": name, "value": float(value), "median": median})
            else:
                past.append(float(value))  # outliers must not enter the median
        began = bool(alarms) and not self._is_on
        self._is_on = bool(alarms)
        return alarms[0] if began else None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as plain values."""
        return {
            "past": {name: list(past) for name, past in self._past.items()},
            "is_on": self._is_on,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned. A metric that is not in it starts without history."""
        self._past = {
            name: deque(state["past"].get(name, ()), maxlen=LOSSES) for name in self.scales
        }
        self._is_on = state["is_on"]


class Progress:
    """Reports the current activity of a training and its time limit.

        progress = Progress(report)
        progress.begin("step")               # ends the previous activity
        with progress.during("evaluation"):  # the step's clock stands still meanwhile
        progress.end()                       # nothing is expected now, e.g. while paused

    `report` is called whenever an activity begins, continues or ends. The worker's watchdog, which
    is another process, compares it with the clock. The limit of an activity follows from the latest
    durations of the same name. The monotonic clock is common to all processes and stands still
    while a machine is suspended (Linux, macOS). Not thread-safe.
    """

    def __init__(
        self,
        report: Callable[[Activity | None], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._report = report
        self._clock = clock
        self._past: dict[str, _Durations] = {}
        self._current: Activity | None = None

    def begin(self, name: str) -> None:
        """Begin an activity; the current one ends."""
        self.end()
        past = self._past.setdefault(name, _Durations())
        self._continue(
            Activity(
                name=name,
                began=self._clock(),
                limit_s=past.limit_s,
                median_s=past.median_s,
            )
        )

    def end(self) -> None:
        """End the current activity; none is expected now."""
        ended = self._current
        self._continue(None)
        if ended is not None:
            self._past[ended.name].add(self._clock() - ended.began)

    @contextmanager
    def during(self, name: str | None) -> Iterator[None]:
        """Time a nested activity; None: no activity, as while paused."""
        outer, left = self._current, self._clock()
        self._current = None
        if name is None:
            self._continue(None)
        else:
            self.begin(name)
        try:
            yield
        finally:
            self.end()
            if outer is not None:
                self._continue(replace(outer, began=outer.began + self._clock() - left))

    def _continue(self, activity: Activity | None) -> None:
        self._current = activity
        self._report(activity)


class _Durations:
    """The latest durations of activities of one name, in seconds."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, bool]] = deque(maxlen=DURATIONS)  # and whether it stalled
        self.median_s: float | None = None
        self.limit_s = UNKNOWN_STALL_S

    def add(self, seconds: float) -> None:
        is_stall = self.median_s is not None and seconds > self.limit_s
        self._latest.append((seconds, is_stall))
        if len(self._latest) >= FEWEST_DURATIONS:
            self.median_s = statistics.median(seconds for seconds, _ in self._latest)
            # Twice the longest: with num_iterations > 1, only one of several GRPO steps generates,
            # and it can take more than ten times as long as the others.
            longest = max((s for s, is_stall in self._latest if not is_stall), default=0.0)
            self.limit_s = max(STALLS_BY * self.median_s, 2 * longest, SHORTEST_STALL_S)
