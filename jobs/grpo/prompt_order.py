"""The order of the training prompts, and of the completions of a step. Imports torch.

They depend only on (seed, epoch) and on (seed, step): a resumed job has the same orders as an
uninterrupted one.
"""

from __future__ import annotations

import torch

from ..keyed_numbers import permutation


def completion_order(count: int, *, seed: int, step: int) -> list[int]:
    """Return the order in which the `count` completions that a step samples fill its micro-batches.

    `step`: the steps done before it. Groups are spread over the micro-batches, as in TRL.
    """
    return permutation(count, use="shuffle", seed=seed, step=step)


class EpochOrders:
    """The orders of `count` prompts in the epochs, by number: permutations of one generator."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._seed = seed
        self._epoch = -1  # of the order below
        self._order: list[int] = []
        self._generator = torch.Generator().manual_seed(seed)

    def of(self, epoch: int) -> list[int]:
        """Return the indices of the prompts in the order of an epoch, from 0."""
        if epoch < self._epoch:
            self._epoch = -1
            self._generator.manual_seed(self._seed)
        while self._epoch < epoch:
            self._order = torch.randperm(self._count, generator=self._generator).tolist()
            self._epoch += 1
        return self._order


class PromptStream:
    """An endless sequence of prompts in the order of the epochs, without dropped remainders.

    Dynamic sampling takes more prompts for some steps than for others. `position`, the number of
    prompts taken so far, is its whole state.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.position = 0
        self._count = count
        self._orders = EpochOrders(count, seed)

    def take(self, count: int) -> list[int]:
        """Return the indices of the next prompts."""
        taken = []
        for position in range(self.position, self.position + count):
            epoch, place = divmod(position, self._count)
            taken.append(self._orders.of(epoch)[place])
        self.position += count
        return taken
