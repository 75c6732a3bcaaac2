"""Metrics of a job as columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_ENVELOPE = {
    "seq",
    "execution",
    "type",
    "step",
    "steps_total",
}  # fields of an event that are not metrics


def columns_of(events: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the numbers of `step` and `eval` events: name -> values, one row per step.

    A value that was measured again after a resume counts once: the later one.
    """
    rows: dict[int, dict[str, Any]] = {}
    for event in events:
        if event["type"] not in ("step", "eval") or event.get("step") is None:
            continue
        prefix = "eval_" if event["type"] == "eval" else ""
        row = rows.setdefault(event["step"], {"step": event["step"]})
        for name, value in event.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number and name not in _ENVELOPE:
                row[prefix + name] = value
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return {name: [rows[step].get(name) for step in sorted(rows)] for name in names}
