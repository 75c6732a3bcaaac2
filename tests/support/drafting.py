"""Speculation for tests and benchmarks: always, and by recorded tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from warmd.jobs.engine.drafts import Lookup, Prompt, Rates
from warmd.jobs.engine.speculation import Speculation


class Always(Speculation):
    """Drafts up to `most` tokens of each sequence, whatever they cost."""

    def __init__(self, most: int = 4) -> None:
        super().__init__()
        self._most = most

    def counts(self, lookups: Sequence[Lookup], room: Sequence[int]) -> list[int]:
        return [min(self._most, one) for one in room]


class RecordedLookup(Lookup):
    """Predicts given tokens instead of those that were there before."""

    def __init__(self, predicted: Sequence[int], shared: Rates) -> None:
        super().__init__(Prompt(()), shared)
        self._predicted = predicted
        self._place = 0

    def add(self, token: int) -> None:
        if self._place < len(self._predicted):
            self._count(2, is_right=self._predicted[self._place] == token)
        self._place += 1

    def chances(self, most: int) -> Iterator[float]:
        chance = 1.0
        for _ in self.drafts(most):
            chance *= self._rates.of(2)
            yield chance

    def drafts(self, count: int) -> list[int]:
        return list(self._predicted[self._place : self._place + count])


class Recorded(Always):
    """Drafts given tokens for each prompt, always."""

    def __init__(self, predicted: Mapping[tuple[int, ...], Sequence[int]], most: int = 4) -> None:
        """`predicted`: the tokens after a prompt, right or wrong; a prompt is a tuple."""
        super().__init__(most)
        self._predicted = predicted

    def lookup(self, ids: Sequence[int]) -> Lookup:
        return RecordedLookup(self._predicted[tuple(ids)], self._rates)
