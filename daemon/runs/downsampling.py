"""Learning curves in few points: the mean, least and largest value of each stretch of steps.

A chart has a thousand pixels, and a long training a hundred thousand steps. All metrics share one
list of stretches, so that a chart can show them over steps, time or tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .curves import metrics_of

Row = Mapping[str, Any]


def downsample(
    events: Iterable[Mapping[str, Any]], *, points: int, first: int = 0, last: int | None = None
) -> dict[str, Any]:
    """Return the metrics of a job between two steps, in at most `points` stretches.

    `steps`, `times` (unix seconds) and `tokens` (trained so far; None: not counted) are those at
    the end of each stretch. `metrics` has for each name the lists `mean`, `min` and `max`, with
    None if a stretch has no value. `seq` is the number of the last event that was read.
    """
    rows: dict[int, dict[str, Any]] = {}
    seq, tokens = 0, 0
    for event in events:
        seq = event["seq"]
        step = event["step"]
        if event["type"] not in ("step", "eval") or step is None:
            continue
        if event["type"] == "step":
            tokens += event.get("tokens") or 0
        row = rows.setdefault(step, {"time": event["time"], "tokens": tokens, "metrics": {}})
        row["time"], row["tokens"] = event["time"], tokens
        row["metrics"].update(metrics_of(event))
    steps = sorted(step for step in rows if first <= step and (last is None or step <= last))
    size = max(1, -(-len(steps) // points))
    stretches = [steps[at : at + size] for at in range(0, len(steps), size)]
    ends = [stretch[-1] for stretch in stretches]
    names = dict.fromkeys(name for step in steps for name in rows[step]["metrics"])
    return {
        "seq": seq,
        "total": len(steps),
        "steps": ends,
        "times": [rows[step]["time"] for step in ends],
        "tokens": [rows[step]["tokens"] or None for step in ends],
        "metrics": {
            name: _summary(
                [
                    [metrics[name] for s in stretch if name in (metrics := rows[s]["metrics"])]
                    for stretch in stretches
                ]
            )
            for name in names
        },
    }


def _summary(groups: Sequence[Sequence[float]]) -> dict[str, list[float | None]]:
    """Mean, least and largest value of each group; None for an empty one."""
    return {
        "mean": [sum(group) / len(group) if group else None for group in groups],
        "min": [min(group, default=None) for group in groups],
        "max": [max(group, default=None) for group in groups],
    }
