"""The metrics in a job's events, as curves over its steps."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...jobs.errors import Conflict, SpecError

# Fields of an event that are not metrics.
_ENVELOPE = {"seq", "execution", "time", "type", "step", "steps_total"}

EVAL = "eval_"  # how metrics of evaluations begin: they may have the name of one of the steps'


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One metric of one job over its steps, which rise; no value is NaN or infinite."""

    job: str
    metric: str
    steps: Sequence[int]
    values: Sequence[float]


def curves_of(job_id: str, events: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    """Return every metric of a job: of its steps as the events name them, of evaluations `eval_…`.

    A value that was measured again, after a resume, counts once: the later one.
    """
    found: dict[str, dict[int, float]] = {}
    for event in events:
        if event["type"] not in ("step", "eval") or event.get("step") is None:
            continue
        for name, value in metrics_of(event):
            found.setdefault(name, {})[event["step"]] = value
    return {
        name: Curve(
            job=job_id, metric=name, steps=sorted(at), values=[at[step] for step in sorted(at)]
        )
        for name, at in found.items()
    }


def metrics_of(event: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Yield the metrics of an event of type `step` or `eval`."""
    prefix = EVAL if event["type"] == "eval" else ""
    for name, value in _numbers(event):
        yield prefix + name, value


FEWEST_SMOOTHED = 40  # points below which a curve is shown as it is
_SPAN = 20  # a smoothed value is about the mean of this part of the curve


def span_of(curve: Curve) -> int:
    """Return the default number of points over which a curve is smoothed; 1: not smoothed."""
    if curve.metric.startswith(EVAL) or len(curve.steps) < FEWEST_SMOOTHED:
        return 1
    return max(len(curve.steps) // _SPAN, 5)


def smoothed(values: Sequence[float], span: int) -> list[float]:
    """Return the exponential moving average of values, debiased, over about `span` of them."""
    if span == 1:
        return list(values)
    keep = 1 - 2 / (span + 1)
    mean = weight = 0.0
    found = []
    for value in values:
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        found.append(mean / weight)
    return found


def _numbers(event: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    for name, value in event.items():
        if name in _ENVELOPE:
            continue
        nested = value.items() if isinstance(value, dict) else [("", value)]  # rewards by name
        for part, number in nested:
            if _is_finite(number):
                yield f"{name}.{part}" if part else name, number


def _is_finite(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value)


def chosen(names: Sequence[str], available: Collection[str]) -> list[str]:
    """Return the requested metrics, or without a request the most informative ones.

    `mlm_acc` is `eval_mlm_acc` where the steps have none. Raises SpecError for one that no job
    has, and Conflict where there is nothing to show at all.
    """
    if not available:
        raise Conflict("job: no step has ended yet: there is nothing to plot")
    if not names:
        main = [n for n in ("loss", "reward", EVAL + "reward") if n in available]
        main += [n for n in available if n.startswith(EVAL) and n.endswith("_acc")]
        return main or list(available)[:1]
    metrics = []
    for name in names:
        known = [n for n in (name, EVAL + name) if n in available]
        if not known:
            takes = ", ".join(sorted(available))
            raise SpecError("metric", f"must be one of {takes}, got {name[:80]!r}")
        metrics.append(known[0])
    return list(dict.fromkeys(metrics))
