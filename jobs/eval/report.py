"""The Markdown report of an evaluation: metrics, comparison and changes. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..intervals import interval_words
from .summary import Change, Metric, Pairing, count_words

REPORT = "report.md"  # in the run directory
_SHOWN = 10  # examples of each kind
_LONGEST = 1500  # characters of a prompt or a completion


def report(
    *,
    title: str,
    about: Mapping[str, str],
    metrics: Mapping[str, Metric],
    rows: Sequence[Mapping[str, Any]],
    against: str | None,
    pairing: Pairing | None,
) -> str:
    """Return the report as Markdown. `against` names the evaluation that it is compared with."""
    return "\n".join(_lines(title, about, metrics, rows, against, pairing)) + "\n"


def _lines(
    title: str,
    about: Mapping[str, str],
    metrics: Mapping[str, Metric],
    rows: Sequence[Mapping[str, Any]],
    against: str | None,
    pairing: Pairing | None,
) -> Iterator[str]:
    yield f"# {_escaped(title)}"
    yield ""
    for name, value in about.items():
        yield f"- {name}: {_escaped(value)}"
    yield from ("", "| Metric | Value | 95 % interval | n |", "| --- | --- | --- | --- |")
    for name, one in metrics.items():
        interval = interval_words(one.low, one.high)
        n = count_words(one.n, one.unscored, one.completions)
        yield f"| {_escaped(name)} | {one.value:.4g} | {interval} | {n} |"
    if pairing is None:
        yield from _examples("Wrong", [row for row in rows if _primary(row) == 0])
        return
    yield from ("", f"## Compared with {_escaped(str(against))}", "")
    yield "| Metric | Difference | 95 % interval | Better | Worse | p | Verdict |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, found in pairing.comparisons.items():
        p = "" if found.p is None else f"{found.p:.3g}"
        yield (
            f"| {_escaped(name)} | {found.difference:+.4g} "
            f"| {interval_words(found.low, found.high, '+.4g')} "
            f"| {found.gained} | {found.lost} | {p} | {found.words} |"
        )
    yield from _changes("From wrong to right", pairing.gained)
    yield from _changes("From right to wrong", pairing.lost)


def _changes(title: str, changes: Sequence[Change]) -> Iterator[str]:
    if not changes:
        return
    yield from ("", f"## {title}: {len(changes)}")
    for change in changes[:_SHOWN]:
        yield from _question(change.after)
        yield from _completion("before", change.before)
        yield from _completion("after", change.after)


def _examples(title: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if not rows:
        return
    yield from ("", f"## {title}: {len(rows)}")
    for row in rows[:_SHOWN]:
        yield from _question(row)
        yield from _completion("answered", row)


def _question(row: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"### Row {row['row']}", "", *_quoted(row["prompt"]))
    if row.get("answer") is not None:
        yield from ("", "expected:", "", *_quoted(str(row["answer"])))


def _completion(title: str, row: Mapping[str, Any]) -> Iterator[str]:
    text = row["completions"][0]["text"] if row.get("completions") else row.get("chosen")
    score = f"{_primary(row):.4g}"
    yield from ("", f"{title} ({score}):", "", *_quoted("" if text is None else str(text)))


def _primary(row: Mapping[str, Any]) -> float:
    """The value of a row's primary metric; NaN if it is unscored."""
    value: float = next(iter(row["metrics"].values()), math.nan)
    return value


def _quoted(text: str) -> list[str]:
    """Return a text as a Markdown code block; of a long text only the end."""
    shown = text if len(text) <= _LONGEST else "…" + text[-_LONGEST:]
    return [f"    {line}" for line in shown.splitlines() or [""]]


def _escaped(text: str) -> str:
    """Return a text escaped for Markdown."""
    line = " ".join(text.split())
    return "".join(f"\\{c}" if c in r"\`*_[]<>#|" else c for c in line)
