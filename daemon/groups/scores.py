"""The scores of the members of a sweep, from their events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..runs import events
from ..runs.rundir import RunDir

_SHARE = 10  # a metric of the steps is its mean over the last tenth of them


def score(rundir: RunDir, metric: str, step: int) -> float | None:
    """Return a job's metric as of a step; None if it is not known or not finite.

    For a job that has finished before that step (dropped rows shorten epochs): as of its end.
    `eval_NAME` is NAME of the evaluation at that step. Another metric is the mean over the last
    tenth of the steps up to it, or that of the evaluation if steps do not have it.
    """
    found: Iterable[Mapping[str, Any]] = ()
    with suppress(FileNotFoundError):  # it has not begun, or was removed
        found = list(events.read(rundir.events))
    if any(event["type"] == "finished" for event in found):
        last = max((event["step"] for event in found if event["type"] == "step"), default=step)
        step = min(step, last)
    name = metric.removeprefix("eval_")
    evaluated = [
        event[name]
        for event in found
        if event["type"] == "eval" and event["step"] == step and _is_number(event.get(name))
    ]
    first = step - max(step // _SHARE, 1)
    of_steps = [
        float(event[metric])
        for event in found
        if event["type"] == "step" and first < event["step"] <= step
        if _is_number(event.get(metric))
    ]
    if metric.startswith("eval_") or not of_steps:
        return float(evaluated[-1]) if evaluated else None
    return sum(of_steps) / len(of_steps)


def mean(values: Iterable[float]) -> float | None:
    """Return the mean; None for no values."""
    found = list(values)
    return sum(found) / len(found) if found else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
