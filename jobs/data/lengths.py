"""Statistics of tokenized rows: lengths, truncation, prompts that are tokenized differently."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

LIMITS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens, inclusive
_SHOWN = 40  # characters of a prompt's end
_FEW = 0.1  # share of truncated rows that needs no warning


@dataclass
class Lengths:
    """Lengths of rows in tokens, before truncation except where noted; counted one by one."""

    max_length: int | None  # tokens at which rows are cut; None: not at all
    rows: int = 0
    tokens: int = 0
    learned_tokens: int = 0  # tokens with a loss, after truncation
    longest: int = 0
    truncated: int = 0
    dropped: int = 0  # rows without a token to learn after truncation
    diverging: int = 0  # rows that do not begin with the tokens of their prompt alone
    first_divergence: str | None = None  # the place of the first one, and the end of its prompt
    _counts: dict[int, int] = field(default_factory=lambda: dict.fromkeys((*LIMITS, 0), 0))

    def add(self, length: int, learned: int | None = None) -> None:
        """Count a row of `length` tokens, of which `learned` have a loss after truncation."""
        self.rows += 1
        self.tokens += length
        self.longest = max(self.longest, length)
        self.truncated += self.max_length is not None and length > self.max_length
        self._counts[next((limit for limit in LIMITS if length <= limit), 0)] += 1
        if learned is not None:
            self.learned_tokens += learned
            self.dropped += learned == 0

    def add_divergence(self, place: str, end: str) -> None:
        """Count a row that does not begin with its prompt's tokens; `end`: what differs."""
        self.diverging += 1
        self.first_divergence = self.first_divergence or f"{place}: from {end[:_SHOWN]!r} on"

    @property
    def histogram(self) -> dict[str, int]:
        """The rows by "<=tokens"."""
        names = {limit: f"<={limit}" if limit else f">{LIMITS[-1]}" for limit in self._counts}
        return {names[limit]: count for limit, count in self._counts.items() if count}

    def facts(self) -> dict[str, Any]:
        """Return the numbers as plain values, for an event."""
        return {
            "max_length": self.max_length,
            "rows": self.rows,
            "tokens": self.tokens,
            "learned_tokens": self.learned_tokens,
            "mean": self.tokens / max(self.rows, 1),
            "longest": self.longest,
            "truncated": self.truncated,
            "dropped": self.dropped,
            "diverging": self.diverging,
            "first_divergence": self.first_divergence,
            "histogram": self.histogram,
        }


def num_shared(ids: Sequence[int], others: Sequence[int]) -> int:
    """Return the number of leading tokens that two sequences share."""
    pairs = zip(ids, others, strict=False)
    return next(
        (place for place, (one, other) in enumerate(pairs) if one != other),
        min(len(ids), len(others)),
    )


def divergence_warning(facts: Mapping[str, Any]) -> str | None:
    """Return TRL's warning of prompts that are tokenized differently alone; None without any.

    `facts`: of a Lengths.
    """
    if not facts["diverging"]:
        return None
    return (
        "dataset: the prompt alone has other tokens than at the beginning of prompt and completion "
        f"in {facts['diverging']} of {facts['rows']} records (the first: "
        f"{facts['first_divergence']}): the end of the prompt is trained as part of the "
        "completion, with other tokens than at inference; end prompts on a token boundary (without "
        "a trailing space), or use a chat template that renders a prompt alike alone and in a chat"
    )


def truncation_warning(facts: Mapping[str, Any]) -> str | None:
    """Return a sentence on rows that are longer than `max_length`; None if they are few."""
    rows, truncated, most = facts["rows"], facts["truncated"], facts["max_length"]
    if truncated <= _FEW * rows:
        return None
    return (
        f"max_length: {truncated:,} of {rows:,} records are longer than {most:,} tokens (the "
        f"longest has {facts['longest']:,}) and are truncated; {facts['dropped']:,} have no token "
        "left to learn and are dropped: a larger max_length keeps them whole"
    )
