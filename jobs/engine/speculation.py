"""Exact speculative decoding: how many drafts of which sequences a step verifies.

A step with drafts has more rows, and takes longer. By the measured seconds of steps and the
measured rates of right predictions, a step gets the drafts with which the most tokens per second
are expected: none where no gain is expected. Imports no torch.
"""

from __future__ import annotations

import weakref
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from .drafts import Lookup, Prompt, Rates

MAX_ROWS = 64  # of a step, with its drafts
MAX_DRAFTS = 15  # of a sequence in a step
_GAIN = 1.25  # least gain in expected speed: with 1.1, right drafts of 30 % took 1.05 times as long
_DOUBLING = 0.2  # part of a step that twice as many rows are assumed to cost, until it is measured
_BEYOND = 0.75  # of the cost of the last measured rows: assumed for more rows
_ENOUGH = 4  # measurements without drafts, before there are any
_FRESH = 8  # first measurements, which are averaged
_WEIGHT = 0.2  # of a later one, in moving averages
_OUTLIER = 1.5  # times as long, or as short: not believed at once
_FIRST_STEPS, _MOST_STEPS = 32, 256  # after which an unused measurement is repeated


@dataclass
class _Measured:
    """The seconds of steps with one number of rows, relative to those of other numbers."""

    relative: float
    count: int
    expires: int  # number of the step


class StepTimes:
    """Measured seconds of steps by their number of rows.

    Other programs and longer contexts change the speed of all steps: one factor follows it, so that
    what is measured now is comparable with what was measured before. Measurements expire after some
    steps, the first time soon, as they may have been disturbed.
    """

    def __init__(self) -> None:
        self._measured: dict[int, _Measured] = {}
        self._times_new: dict[int, int] = {}
        self._rows: list[int] = []  # measured numbers, sorted
        self._factor = 0.0  # seconds of relative time 1
        self._steps = 0
        self._latest = 0  # number of rows

    @property
    def most(self) -> int:
        """The largest number of rows worth a try: twice the largest measured one."""
        return 2 * self._rows[-1] if self._rows else 0

    def is_known(self, rows: int) -> bool:
        """Whether the seconds for exactly this number of rows have been measured."""
        return rows in self._measured and self._measured[rows].count >= _ENOUGH

    def relative(self, rows: int) -> float:
        """Return the relative time for a number of rows; something must have been measured.

        Between two measured numbers it is interpolated. Above them rows are assumed to cost rather
        too little, so that larger numbers are tried.
        """
        known, place = self._rows, bisect(self._rows, rows)
        low = known[max(place - 1, 0)]
        of_low = self._measured[low].relative
        if place < len(known):
            high = known[place]
            return of_low + self._slope(low, high) * (rows - low)
        if place == 1:
            return of_low * (1 + _DOUBLING * (rows - low) / low)
        return of_low + max(0.0, self._slope(known[-2], low)) * _BEYOND * (rows - low)

    def _slope(self, low: int, high: int) -> float:
        """Return the relative time of a row between two measured numbers; 0 if they are equal."""
        more = self._measured[high].relative - self._measured[low].relative
        return more / (high - low) if high > low else 0.0

    def measure(self, rows: int, seconds: float) -> None:
        """Add a measurement."""
        self._steps += 1
        self._expire()
        self._factor = self._factor or seconds
        found = self._measured.get(rows)
        if found is None:
            found = self._add(rows)
        if found.count < _FRESH:
            found.relative += (seconds / self._factor - found.relative) / (found.count + 1)
        else:
            self._update(found, seconds, is_change=rows != self._latest)
        found.count += 1
        found.expires = self._steps + min(_FIRST_STEPS << self._times_new[rows], _MOST_STEPS)
        self._latest = rows

    def _add(self, rows: int) -> _Measured:
        self._times_new[rows] = self._times_new.get(rows, -1) + 1
        self._measured[rows] = found = _Measured(0.0, 0, 0)
        self._rows = sorted(self._measured)
        return found

    def _update(self, found: _Measured, seconds: float, *, is_change: bool) -> None:
        """Attribute what differs to the number of rows where it has just changed; and to all."""
        expected = found.relative * self._factor
        ratio = min(max(seconds / expected, 1 / _OUTLIER), _OUTLIER)
        if is_change:
            found.relative *= 1 + _WEIGHT * (ratio - 1)
        self._factor *= 1 + _WEIGHT * (ratio - 1)

    def _expire(self) -> None:
        if self._steps % _FIRST_STEPS == 0:
            for rows in [n for n, one in self._measured.items() if one.expires < self._steps]:
                del self._measured[rows]
            self._rows = sorted(self._measured)


class Speculation:
    """Decides the drafts of one engine's steps."""

    def __init__(self) -> None:
        self._times = StepTimes()
        self._rates = Rates()  # of all sequences: where a new one begins
        # The latest, while a lookup has it: completions of one prompt begin together.
        self._prompt: weakref.ref[Prompt] | None = None

    def lookup(self, ids: Sequence[int]) -> Lookup | None:
        """Return the lookup of a new sequence with these prompt tokens; None to draft nothing."""
        prompt = None if self._prompt is None else self._prompt()
        if prompt is None or prompt.ids is not ids:
            prompt = Prompt(ids)
            self._prompt = weakref.ref(prompt)
        return Lookup(prompt, self._rates)

    def measure(self, rows: int, seconds: float) -> None:
        """Add the duration of a step that only decoded, with that many rows."""
        if rows <= MAX_ROWS:
            self._times.measure(rows, seconds)

    def counts(self, lookups: Sequence[Lookup], room: Sequence[int]) -> list[int]:
        """Return the number of drafts for each sequence of a step.

        `room`: how many tokens each may draft at most.
        """
        rows = len(lookups)
        counts = [0] * rows
        most = min(MAX_ROWS, self._times.most) - rows
        if most <= 0 or not self._times.is_known(rows):
            return counts
        chances = [
            (chance, place)
            for place, (lookup, left) in enumerate(zip(lookups, room, strict=True))
            for chance in lookup.chances(min(left, most, MAX_DRAFTS))
        ]
        chances.sort(reverse=True)
        for _, place in chances[: self._best(rows, [chance for chance, _ in chances[:most]])]:
            counts[place] += 1
        return counts

    def _best(self, rows: int, chances: Sequence[float]) -> int:
        """Return how many of the drafts, the most likely first, give the highest speed."""
        best, expected, least = 0, float(rows), self._times.relative(rows)
        highest = _GAIN * rows / least
        for count, chance in enumerate(chances, 1):
            expected += chance
            speed = expected / max(self._times.relative(rows + count), least)
            if speed > highest:
                best, highest = count, speed
        return best


class NoDrafts(Speculation):
    """Steps of one token per sequence: for measurements of the steps themselves."""

    def lookup(self, ids: Sequence[int]) -> None:
        return None
