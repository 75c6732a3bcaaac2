"""The metrics of runs in few numbers, from their events, each of which is read once.

What was read of a run is kept as JSON, a kilobyte each, and continued where the file has grown.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import orjson

from ....jobs import KINDS, spec_class
from ....jobs.eval.options import EvalSpec
from ....jobs.eval.summary import LOWER_IS_BETTER
from ....jobs.training.options import TrainingSpec
from ...runs import events
from ...runs.curves import EVAL, metrics_of
from ...runs.rundir import RunDir

_KEPT = 10_000  # runs
_COUNTS = ("n", "unscored", "completions")  # of an evaluation
_PIECE = 2**20  # bytes of events that are parsed at once

Metrics = dict[str, dict[str, float]]


@dataclass(frozen=True)
class _Part:
    """The part of a run's events that was read."""

    end: int = 0  # in bytes
    metrics: bytes = b"{}"  # JSON


class RunMetrics:
    """Reads the metrics of runs. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Part] = OrderedDict()  # the latest used at the end

    def of(self, rundir: RunDir, kind: str) -> Metrics:
        """Return for each metric its `last` value, and with those that judge a run the `best`.

        The last one has the ends of its 95 % interval, `low` and `high`, if they are known.
        """
        job_id = rundir.path.name
        with self._lock:
            known = self._known.pop(job_id, _Part())
        try:
            size = rundir.events.stat().st_size
        except OSError:
            return {}
        if size < known.end:  # another job's file, or one that was repaired
            known = _Part()
        found: Metrics = orjson.loads(known.metrics)
        if size > known.end:
            end = known.end
            while True:
                piece, end = events.read_piece(rundir.events, end, 0, _PIECE)
                if not piece:
                    break
                for event in piece:
                    _add(found, event, kind)
            found = _rounded(found)
            known = _Part(end, orjson.dumps(found))
        with self._lock:
            self._known[job_id] = known
            if len(self._known) > _KEPT:
                self._known.popitem(last=False)
        return found


def _add(found: Metrics, event: Mapping[str, Any], kind: str) -> None:
    if event["type"] not in ("step", "eval"):
        return
    for name, value in metrics_of(event):
        before, now = found.get(name), {"last": value}
        if (choose := _best(kind, name)) is not None:
            now["best"] = value if before is None else choose(before["best"], value)
        found[name] = now
    if event["type"] == "eval":
        for name, ends in (event.get("intervals") or {}).items():
            if ends is not None and EVAL + name in found:
                found[EVAL + name] |= {"low": ends[0], "high": ends[1]}


@cache
def _best(kind: str, metric: str) -> Callable[[float, float], float] | None:
    """Return min or max, which chooses the better value; None for a metric that judges no run."""
    spec = spec_class(kind) if kind in KINDS else None
    name = metric.removeprefix(EVAL)
    if spec is EvalSpec and metric.startswith(EVAL) and name not in _COUNTS:
        return min if name in LOWER_IS_BETTER or name.endswith("_perplexity") else max
    if spec is not None and issubclass(spec, TrainingSpec) and {metric, name} & {*spec.judged_by}:
        return min if {metric, name} & {*spec.lower_is_better} else max
    return None


def _rounded(found: Metrics) -> Metrics:
    return {
        name: {part: float(f"{value:.6g}") for part, value in values.items()}
        for name, values in found.items()
    }
