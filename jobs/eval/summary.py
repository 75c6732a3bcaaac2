"""Reduces the rows of an evaluation to metrics with 95 % intervals, and compares two of them.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..intervals import Comparison, compare, estimate, interval_of, mean_interval

BITS_PER_BYTE = "bits_per_byte"
LOWER_IS_BETTER = (BITS_PER_BYTE,)


@dataclass(frozen=True)
class Metric:
    """A mean over questions with its 95 % interval: Wilson's of 0s and 1s, else Student's."""

    value: float
    low: float | None  # None: unknown (a single question)
    high: float | None
    n: int
    unscored: int = 0  # completions without this score, which are left out
    completions: int = 0  # in all; 0: the metric is no score of completions


def metrics_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Metric]:
    """Return the metrics of rows, in the order of the first row: its first is the primary one."""
    names = list(dict.fromkeys(name for row in rows for name in row["metrics"]))
    found = {
        name: _metric(_values(rows, name), _weights(rows, name), scores_of(rows, name))
        for name in names
    }
    if BITS_PER_BYTE in found:
        found |= _perplexities(rows, found[BITS_PER_BYTE])
    return found


def scores_of(rows: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    """Return a score of each completion of all rows, None where it is unscored.

    Empty for a metric that is no score of completions.
    """
    scores = [one.get("scores", {}) for row in rows for one in row.get("completions", ())]
    return [found[name] for found in scores if name in found]


def _values(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return a metric of each row that has it; their mean, by `_weights`, is the metric of all."""
    return [row["metrics"][name] for row in rows if name in row["metrics"]]


def _weights(rows: Sequence[Mapping[str, Any]], name: str) -> list[float] | None:
    """Return the weight of each row in a metric; None: all equal.

    Bits per byte are the ratio of all bits to all bytes: weighted by the length of the text.
    """
    return [row["bytes"] for row in rows] if name == BITS_PER_BYTE else None


def _perplexities(rows: Sequence[Mapping[str, Any]], found: Metric) -> dict[str, Metric]:
    """Return perplexities per byte, word and token, from the bits per byte.

    Values beyond the largest float are left out.
    """
    totals = {unit: sum(row[unit] for row in rows) for unit in ("bytes", "words", "tokens")}
    perplexities = {}
    for unit, count in totals.items():
        with suppress(OverflowError):
            value, low, high = (
                None if bits is None else 2.0 ** (bits * totals["bytes"] / count)
                for bits in (found.value, found.low, found.high)
            )
            assert value is not None
            name = f"{unit.removesuffix('s')}_perplexity"
            perplexities[name] = Metric(value, low, high, found.n)
    return perplexities


def _metric(
    values: Sequence[float], weights: Sequence[float] | None, scores: Sequence[float | None]
) -> Metric:
    interval = interval_of(values) if weights is None else mean_interval(values, weights)
    low, high = interval or (None, None)
    mean = estimate(values, weights).mean
    return Metric(mean, low, high, len(values), scores.count(None), len(scores))


def unscored_fields(metric: Metric) -> dict[str, int]:
    """Return what an event says about the completions that a mean leaves out; {} for none."""
    if not metric.unscored:
        return {}
    return {"unscored": metric.unscored, "completions": metric.completions}


def count_words(n: int | None, unscored: int, completions: int) -> str:
    """Return what a mean counts and leaves out: '40', or '37 (unscored: 3 of 40)'.

    `n`: questions. `unscored`, `completions`: as in Metric.
    """
    return f"{n} (unscored: {unscored} of {completions})" if unscored else str(n)


@dataclass(frozen=True)
class Change:
    """A question that two models answered with different scores."""

    before: Mapping[str, Any]  # rows
    after: Mapping[str, Any]
    difference: float  # in the primary metric; above 0: better


@dataclass(frozen=True)
class Pairing:
    """An evaluation compared with an earlier one, by the questions that both have."""

    comparisons: Mapping[str, Comparison]  # by metric; the first is the primary one
    changes: Sequence[Change]  # in the order of the questions

    @property
    def gained(self) -> list[Change]:
        return [change for change in self.changes if change.difference > 0]

    @property
    def lost(self) -> list[Change]:
        return [change for change in self.changes if change.difference < 0]

    def to_json(self) -> dict[str, Any]:
        """Return the comparisons as plain values."""
        return {
            name: {**asdict(found), "words": found.words}
            for name, found in self.comparisons.items()
        }


def pair(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> Pairing | None:
    """Pair the rows of two evaluations by their questions.

    Each metric is compared on the questions where both have it, and the others are counted as
    unscored. None if there is no such metric.
    """
    known = {row["question"]: row for row in before}
    pairs = [(known[row["question"]], row) for row in after if row["question"] in known]
    found: dict[str, Comparison] = {}
    changes: list[Change] = []
    for name in dict.fromkeys(name for _, row in pairs for name in row["metrics"]):
        scored = [both for both in pairs if all(name in row["metrics"] for row in both)]
        if not scored:
            continue
        first, second = ([both[i]["metrics"][name] for both in scored] for i in (0, 1))
        weights = _weights([row for _, row in scored], name)
        lower = name in LOWER_IS_BETTER
        one = compare(first, second, weights=weights, lower_is_better=lower)
        if not found:  # the primary metric
            sign = -1 if lower else 1
            changes = [
                Change(*both, sign * (b - a))
                for both, a, b in zip(scored, first, second, strict=True)
                if a != b
            ]
        found[name] = replace(one, unscored=len(pairs) - len(scored))
    return Pairing(found, changes) if found else None
