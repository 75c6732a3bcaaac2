"""The order of the training prompts: depends only on (seed, epoch). Imports torch.

A resumed job has the same order as an uninterrupted one.
"""

from __future__ import annotations

import torch
from trl.trainer.utils import RepeatSampler


class EpochSampler(RepeatSampler):
    """TRL's RepeatSampler, with an order that depends on (seed, epoch) only.

    The original draws permutations from a generator that is not in the checkpoint, so a resumed
    run would start with the order of the first epoch.
    """

    def set_epoch(self, epoch: int) -> None:
        """Set the generator to its state at the start of `epoch` in an uninterrupted run."""
        self.generator.manual_seed(self.seed or 0)
        for _ in range(epoch):
            torch.randperm(self.num_samples, generator=self.generator)


class PromptStream:
    """An endless sequence of prompts in the order of EpochSampler, without dropped remainders.

    Dynamic sampling takes more prompts for some steps than for others. `position`, the number of
    prompts taken so far, is its whole state.
    """

    def __init__(self, num_prompts: int, seed: int) -> None:
        self.position = 0
        self._num_prompts = num_prompts
        self._seed = seed
        self._epoch = -1  # of the order below
        self._order: list[int] = []

    def take(self, count: int) -> list[int]:
        """Return the indices of the next prompts."""
        taken = [self._at(self.position + offset) for offset in range(count)]
        self.position += count
        return taken

    def _at(self, position: int) -> int:
        epoch, place = divmod(position, self._num_prompts)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self._seed)
            for _ in range(epoch + 1):
                order = torch.randperm(self._num_prompts, generator=generator)
            self._epoch, self._order = epoch, order.tolist()
        return self._order[place]
