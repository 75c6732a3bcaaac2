"""Rows in an order that depends only on (seed, epoch), and the simplest task on them.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .epochs import Epochs, drawn_by_epoch
from .loop import Loss

R = TypeVar("R")


def micro_batches(rows: Sequence[R], args: Any, first_step: int) -> Iterator[list[list[R]]]:
    """Yield the rows of the micro-batches of each step, from `first_step` on.

    An epoch has all rows, each once; its last step and micro-batch may have fewer. Draws one number
    from torch's generator at the start of an epoch, as torch's DataLoader does, so that the random
    numbers of a step are those that it had with the Trainer of transformers. `args`: transformers'
    TrainingArguments, with seed, batch size and gradient accumulation.
    """
    size = args.per_device_train_batch_size
    order = drawn_by_epoch(len(rows), args.seed)
    epochs = Epochs(order, len(rows), size * args.gradient_accumulation_steps)
    for step in count(first_step):
        if step % epochs.steps == 0:
            torch.empty((), dtype=torch.int64).random_()
        taken = [rows[number] for number in epochs.at(step)[1]]
        yield [taken[i : i + size] for i in range(0, len(taken), size)]


class RowTask(Generic[R]):
    """A task that learns from rows, by a function that returns the mean loss of some of them.

    A loop.Task. `args`: transformers.TrainingArguments.
    """

    def __init__(
        self, rows: Sequence[R], mean_loss: Callable[[Sequence[R]], Tensor], args: Any
    ) -> None:
        self._rows = rows
        self._mean_loss = mean_loss
        self._args = args

    def batches(self, first_step: int) -> Iterator[Sequence[tuple[Sequence[R], int]]]:
        """Yield the micro-batches of each step: their rows, and how many of them there are."""
        for parts in micro_batches(self._rows, self._args, first_step):
            yield [(part, len(parts)) for part in parts]

    def loss(self, micro_batch: tuple[Sequence[R], int]) -> Iterator[Loss]:
        rows, of = micro_batch
        yield Loss(self._mean_loss(rows) / of)

    def fields(self, batch: Any, sums: Mapping[str, float]) -> dict[str, Any]:
        return {}

    def state(self) -> dict[str, Any]:
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """It has no state."""
