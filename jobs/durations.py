"""Durations as options have them: `90s`, `15m`, `1h30m` or `2d`. Standard library only."""

from __future__ import annotations

import math

from ..configs.values import ConfigError, duration_s
from .errors import SpecError

LONGEST_S = 10 * 365 * 86400


def parse_duration(field: str, text: str) -> float:
    """Return the seconds of `90s`, `15m`, `1h30m` or `2d`: more than none, at most ten years.

    A number without a unit is refused: Slurm, for example, reads it as minutes. Raises SpecError.
    """
    if _is_number(text):
        raise SpecError(field, f"must have a unit, such as 90s, 15m or 1h30m, got {text!r}")
    try:
        seconds = duration_s(field, text)
    except ConfigError as error:
        raise SpecError(error.field, error.problem) from None
    if not 0 < seconds <= LONGEST_S:
        raise SpecError(field, f"must be above 0 and at most 3650d, got {text!r}")
    return seconds


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
