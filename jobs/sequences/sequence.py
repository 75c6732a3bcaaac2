"""A sequence of tokens to be scored: its tokens, and the weight of each in a loss.

Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Sequence:
    """The tokens of a sequence; the model sees all of them and is scored at those with a weight.

    tokens, weights: one each. The first weight is 0: nothing predicts the first token. `row` and
    `column`: the place of the first token in tables of the tokens of a batch; several sequences may
    belong to one row. `shared`: the number of first tokens that a pack computes once for all
    sequences which begin with them.
    """

    tokens: tuple[int, ...]
    weights: tuple[float, ...]
    row: int = 0
    column: int = 0
    shared: int = 0

    @cached_property
    def num_inputs(self) -> int:
        """The tokens that some scored token depends on: those before the last one with a weight."""
        places = reversed(range(len(self.tokens)))
        return next((place for place in places if self.weights[place]), 0)

    @property
    def head(self) -> tuple[int, ...]:
        """The tokens that it shares."""
        return self.tokens[: self.shared]

    @property
    def tail(self) -> tuple[int, ...]:
        """Its other inputs."""
        return self.tokens[self.shared : self.num_inputs]

    @property
    def scored(self) -> list[int]:
        """The places of the tokens with a weight."""
        return [place for place, weight in enumerate(self.weights) if weight]
