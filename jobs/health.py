"""Whether a training is well: a loss that runs away, and a step that does not end.

`JobTrainer` feeds both. Neither imports torch, and neither costs a step anything that shows.
"""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Self

log = logging.getLogger(__name__)

DIVERGES_BY = 3.0  # times the median
LOSSES = 100  # steps whose median a loss is compared with
FEWEST_LOSSES = 10  # before any is judged

STALLS_BY = 10.0  # times the median
DURATIONS = 32  # whose median a duration is compared with
FEWEST_DURATIONS = 5  # before any is judged
SHORTEST_STALL_S = 5.0


class Divergence:
    """Says when a metric of the steps exceeds three times the moving median of its own past.

    `scales` names the metrics that are watched, each with the least median that it is compared
    with. A median alone says nothing where a metric is around 0 or below: the loss of GRPO is, by
    construction, at every step that begins new completions, and the loss of an MLM that has learnt
    its data is soon. So a metric exceeds 3 x max(median, scale), and its scale is the size from
    which on it means anything. What is None or not finite is passed over.
    """

    def __init__(self, scales: Mapping[str, float]) -> None:
        self.scales = dict(scales)
        self._past: dict[str, deque[float]] = {name: deque(maxlen=LOSSES) for name in scales}
        self._is_on = False  # whether it was said, and has not ended since

    def update(self, metrics: Mapping[str, Any]) -> dict[str, Any] | None:
        """Take in a step's metrics; return the fields of a `divergence` event when one begins.

        It is said once, and again only after a step that was well. The fields are `metric`, its
        `value` and the `median` of its past.
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
                past.append(float(value))  # what is not well must not become what is usual
        began = bool(alarms) and not self._is_on
        self._is_on = bool(alarms)
        return alarms[0] if began else None

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint must hold, so that a resumed run says the same; plain values."""
        return {
            "past": {name: list(past) for name, past in self._past.items()},
            "is_on": self._is_on,
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take up what `state` returned. A metric that it does not have begins without a past."""
        self._past = {
            name: deque(state["past"].get(name, ()), maxlen=LOSSES) for name in self.scales
        }
        self._is_on = state["is_on"]


@dataclass(frozen=True, kw_only=True)
class Stall:
    """Something takes more than ten times as long as usual. The fields of a `stall` event."""

    activity: str  # as it was begun: step, checkpoint, evaluation
    seconds: float  # so far
    median_s: float  # of the latest ones of its kind

    def fields(self) -> dict[str, Any]:
        """Return them as plain values, by name."""
        return asdict(self)


class StallWatch:
    """Watches, in a thread of its own, how long what the training does takes.

        with StallWatch(on_stall) as watch:
            watch.begin("step")             # ends what was under way before
            with watch.during("checkpoint"):  # the step's clock stands still meanwhile
            watch.end()                     # nothing is expected now, as while paused

    `on_stall` is called once for each stall while it lasts, in the thread of the watch; or in the
    caller's at its end, where whatever stalled kept the interpreter to itself. It should be short,
    and raise nothing but OSError. Each activity is compared with the latest of its own kind, at
    least five of them, and is no stall below `shortest_s`. The clock is the monotonic one, which
    does not run while a machine is suspended (Linux, macOS). Not for several threads at once.
    """

    def __init__(
        self,
        on_stall: Callable[[Stall], None],
        *,
        shortest_s: float = SHORTEST_STALL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_stall = on_stall
        self._shortest_s = shortest_s
        self._clock = clock
        self._past: dict[str, _Durations] = {}
        self._current: _Activity | None = None
        self._lock = threading.Lock()  # of what is above, and of calling back once
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stall-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread; nobody is called back any more afterwards."""
        self._closed.set()
        self._thread.join()

    def begin(self, activity: str) -> None:
        """Something begins, and what was under way has ended."""
        self.end()
        with self._lock:
            self._current = _Activity(activity, self._clock())

    def end(self) -> None:
        """What was under way has ended, and nothing is expected to."""
        self.look()
        with self._lock:
            ended, self._current = self._current, None
            if ended is not None:
                past = self._past.setdefault(ended.name, _Durations())
                past.add(self._clock() - ended.began, is_stall=ended.is_told)

    @contextmanager
    def during(self, activity: str | None) -> Iterator[None]:
        """Time something apart from what is under way; with None nothing, as while paused."""
        self.look()
        with self._lock:
            outer, self._current = self._current, None
            left = self._clock()
        if activity is not None:
            self.begin(activity)
        try:
            yield
        finally:
            self.end()
            with self._lock:
                if outer is not None:
                    outer.began += self._clock() - left
                self._current = outer

    def look(self) -> None:
        """Call back if what is under way has just become a stall."""
        with self._lock:
            current = self._current
            if current is None or current.is_told:
                return
            past = self._past.get(current.name)
            seconds = self._clock() - current.began
            if past is None or seconds <= max(past.longest_expected_s, self._shortest_s):
                return
            current.is_told = True
            stall = Stall(activity=current.name, seconds=seconds, median_s=past.median)
            # Under the lock: at the latest when `end` returns, it has been said.
            try:
                self._on_stall(stall)
            except OSError as error:  # a full disk; the training meets it, too
                log.warning("stall not recorded: %s", error)

    def _run(self) -> None:
        while not self._closed.wait(self._shortest_s / 5):
            self.look()


@dataclass
class _Activity:
    name: str
    began: float  # later by what was timed apart since
    is_told: bool = False


class _Durations:
    """The latest durations of one kind of activity, in seconds."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, bool]] = deque(maxlen=DURATIONS)
        self.median = math.nan
        self.longest_expected_s = math.inf  # nothing is judged by less than a few

    def add(self, seconds: float, *, is_stall: bool) -> None:
        self._latest.append((seconds, is_stall))
        if len(self._latest) >= FEWEST_DURATIONS:
            self.median = statistics.median(seconds for seconds, _ in self._latest)
            # Twice the longest: of the steps of GRPO with num_iterations, one in several
            # generates, and can take more than ten times as long as the others.
            longest = max((s for s, is_stall in self._latest if not is_stall), default=0.0)
            self.longest_expected_s = max(STALLS_BY * self.median, 2 * longest)
