"""The order of epochs: the examples of a step depend on the seed and the step only.

So a resumed job has the same data as an uninterrupted one. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Order = Callable[[int], Any]  # the numbers of all examples, in the order of an epoch from 0 on


class Epochs:
    """`count` examples in the `order` of every epoch, cut into steps.

    The last step of an epoch has fewer examples, or is left out if `drops_rest`.
    """

    def __init__(
        self, order: Order, count: int, per_step: int, *, drops_rest: bool = False
    ) -> None:
        self.steps = count // per_step if drops_rest else -(-count // per_step)  # of an epoch
        self._order = order
        self._per_step = per_step
        self._epoch = -1  # of the numbers below
        self._numbers: Sequence[int] = ()

    def at(self, step: int) -> tuple[int, Any]:
        """Return the epoch of a step, counted from 0, and the numbers of its examples."""
        epoch, place = divmod(step, self.steps)
        if epoch != self._epoch:
            self._epoch, self._numbers = epoch, self._order(epoch)
        return epoch, self._numbers[place * self._per_step : (place + 1) * self._per_step]


def drawn_by_epoch(count: int, seed: int) -> Order:
    """Return permutations of a generator for each epoch, as transformers' Trainer has them."""

    def order(epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed * 2**20 + epoch)
        return torch.randperm(count, generator=generator).tolist()

    return order


def drawn_in_sequence(count: int, seed: int) -> Order:
    """Return the permutations that one generator draws, as TRL's RepeatSampler has them."""
    generator, num_drawn = torch.Generator().manual_seed(seed), 0

    def order(epoch: int) -> list[int]:
        nonlocal num_drawn
        if epoch < num_drawn:
            generator.manual_seed(seed)
            num_drawn = 0
        while num_drawn <= epoch:
            found = torch.randperm(count, generator=generator)
            num_drawn += 1
        return found.tolist()

    return order
