"""Exponential backoff: pauses between tries that double up to a limit."""

from __future__ import annotations

_MOST_DOUBLINGS = 32  # float64 overflows beyond 1023, after hours of tries


def backoff_s(tries: int, *, first_s: float, longest_s: float) -> float:
    """Return the pause in seconds before the next try; `tries`: tries that had a pause before."""
    return min(first_s * 2.0 ** min(tries, _MOST_DOUBLINGS), longest_s)
