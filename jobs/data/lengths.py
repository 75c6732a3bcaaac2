"""Statistics of the lengths of tokenized rows: counts, percentiles, truncation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LIMITS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)  # tokens, inclusive


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
            "histogram": self.histogram,
        }
