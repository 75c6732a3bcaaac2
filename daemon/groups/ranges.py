"""Ranges of numbers, from which a search chooses values: `1e-6..1e-3:log`."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from ...jobs.errors import SpecError
from ...jobs.spec import OptionInfo

_DIGITS = 4  # significant ones of a value that a search chooses
_RANGE = re.compile(r"(?P<low>[^.:]+(?:\.[^.:]+)?)\.\.(?P<high>[^.:]+(?:\.[^.:]+)?)(?P<log>:log)?")


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included."""

    low: int | float  # an integer stays one in JSON
    high: int | float
    log: bool  # whether equal ratios are equally likely, not equal differences
    is_integer: bool

    @classmethod
    def parse(cls, option: OptionInfo, text: Any) -> Range | None:
        """Return the range that a value of a numeric option names; None if it is a plain value.

        Raises SpecError for ends that the option does not take, or that make no range.
        """
        if option.type not in (int, float) or not isinstance(text, str) or ".." not in text:
            return None
        found = _RANGE.fullmatch(text.replace(" ", ""))
        if found is None:
            raise SpecError(
                option.name, f"must be LOW..HIGH or LOW..HIGH:log for a range, got {text[:80]!r}"
            )
        low, high = option.convert(found["low"]), option.convert(found["high"])
        log = found["log"] is not None
        if low is None or high is None or not low < high:
            raise SpecError(option.name, f"must rise in a range, got {text[:80]!r}")
        if log and low <= 0:
            raise SpecError(option.name, f"must be above 0 in a range with :log, got {text[:80]!r}")
        return cls(low, high, log, option.type is int)

    @property
    def text(self) -> str:
        """The range as it is written on the command line."""
        return f"{self.low:g}..{self.high:g}{':log' if self.log else ''}"

    def rounded(self, value: float) -> float:
        """Return a value of the range with few digits, still within it."""
        if self.is_integer:
            return int(value)
        exponent = math.floor(math.log10(abs(value))) if value else 0
        return min(max(round(value, _DIGITS - 1 - exponent), self.low), self.high)
