"""Prompt lookup: predicts the next tokens of a sequence by an earlier occurrence of its last ones.

The tokens that followed it are drafts for speculative decoding (Leviathan et al., ICML 2023), which
needs no second model. Occurrences are found by hash chains of token pairs, as in LZ77 compressors.
Every drawn token is compared with its prediction, whether it was drafted or not, so the share of
right predictions is measured without computing a draft. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import numpy as np

_TOKEN_BITS = 32
_CHAIN = 8  # latest occurrences of the last two tokens that are compared
_LONGEST = 32  # tokens of a match that are compared
_KINDS = 5  # of matches: 2 or 3 tokens, 4 to 7, 8 to 15, 16 to 31, more
_OWN, _SHARED = 0.1, 0.02  # weights of the latest prediction in moving averages
_BEFORE = 3  # predictions that the rates of other sequences count as, in a new one
_LEAST = 0.1  # chance below which a token is not drafted


class Rates:
    """Shares of right predictions, by the length of the match: moving averages."""

    def __init__(self, rates: Sequence[float] = (0.5,) * _KINDS) -> None:
        self._rates = list(rates)

    def copy(self) -> Rates:
        return Rates(self._rates)

    def of(self, length: int) -> float:
        """Return the rate for matches of that many tokens, at least two."""
        return self._rates[_kind(length)]

    def count(self, length: int, weight: float, *, is_right: bool) -> None:
        """Count a prediction from a match of that many tokens."""
        kind = _kind(length)
        self._rates[kind] += weight * (is_right - self._rates[kind])


def _kind(length: int) -> int:
    return min(length.bit_length() - 2, _KINDS - 1)


class Prompt:
    """The tokens of a prompt, and their chains, made once for all of its completions."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids

    @cached_property
    def chains(self) -> tuple[dict[int, int], list[int]]:
        """`_latest` and `_earlier` of a Lookup after these tokens."""
        ids = np.array(self.ids, dtype=np.int64)
        earlier = np.zeros(max(len(ids), 1) + 1, dtype=np.int64)
        pairs = ids[:-1] << _TOKEN_BITS | ids[1:]
        order = np.argsort(pairs, kind="stable")
        is_repeated = pairs[order[1:]] == pairs[order[:-1]]
        earlier[order[1:][is_repeated] + 2] = order[:-1][is_repeated] + 2
        latest = dict(zip(pairs.tolist(), range(2, len(ids) + 1), strict=True))
        return latest, earlier.tolist()


class Lookup:
    """The tokens of one sequence, and the prediction of those that follow."""

    def __init__(self, prompt: Prompt, shared: Rates) -> None:
        """`prompt`: read at the first `add`. `shared`: of all sequences, updated here."""
        self._prompt: Prompt | None = prompt
        self._shared = shared
        self._rates = shared.copy()
        self._num_predicted = 0
        self._ids: list[int] = []
        # By two tokens, the position after their latest occurrence; and by such a position, that
        # after the occurrence before it.
        self._latest: dict[int, int] = {}
        self._earlier: list[int] = [0, 0]
        self._next = 0  # position of the token that is predicted next; 0: no match
        self._length = 0  # of the match

    def add(self, token: int) -> None:
        """Append a drawn token."""
        if self._prompt is not None:
            self._ids = list(self._prompt.ids)
            latest, earlier = self._prompt.chains
            self._latest, self._earlier = latest.copy(), earlier.copy()
            self._prompt = None
            self._match(self._earlier[-1])
        is_right = self._next > 0 and self._ids[self._next] == token
        if self._next:
            self._count(self._length, is_right=is_right)
        self._append(token)
        if is_right:  # no other match can be longer by more than this token
            self._next, self._length = self._next + 1, self._length + 1
        else:
            self._match(self._earlier[-1])

    def chances(self, most: int) -> Iterator[float]:
        """Yield, for up to `most` drafts, the chance that a draft and all before it are right."""
        chance = 1.0
        for place in range(most if self._next else 0):
            chance *= self._rates.of(self._length + place)
            if chance < _LEAST:
                return
            yield chance

    def drafts(self, count: int) -> list[int]:
        """Return the next tokens as predicted; none without a match."""
        if not self._next:
            return []
        found = self._ids[self._next : self._next + count]
        period = len(self._ids) - self._next
        while len(found) < count:  # the match overlaps what it predicts: a repetition
            found.append(found[-period])
        return found

    def _count(self, length: int, *, is_right: bool) -> None:
        """Count a prediction from a match of that many tokens."""
        self._num_predicted += 1
        weight = max(_OWN, 1 / (_BEFORE + self._num_predicted))
        self._rates.count(length, weight, is_right=is_right)
        self._shared.count(length, _SHARED, is_right=is_right)

    def _append(self, token: int) -> None:
        ids = self._ids
        ids.append(token)
        if len(ids) > 1:
            pair = ids[-2] << _TOKEN_BITS | token
            self._earlier.append(self._latest.get(pair, 0))
            self._latest[pair] = len(ids)

    def _match(self, position: int) -> None:
        """Find the longest match among the occurrences that end before a position of the chain."""
        self._next = self._length = 0
        for _ in range(_CHAIN):
            if not position:
                return
            if (length := self._common(position)) > self._length:
                self._next, self._length = position, length
            position = self._earlier[position]

    def _common(self, position: int) -> int:
        """Return the number of equal tokens before a position and at the end, at least two."""
        ids, length = self._ids, 2
        most = min(position, _LONGEST)
        while length < most and ids[position - 1 - length] == ids[-1 - length]:
            length += 1
        return length
