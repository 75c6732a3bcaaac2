"""Rows in an order that depends only on (seed, epoch), and the simplest task on them.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .loop import Loss

R = TypeVar("R")


def row_batches(
    count: int, seed: int, *, micro_batch: int, accumulated: int, first_step: int
) -> Iterator[list[list[int]]]:
    """Yield the micro-batches of each step, as numbers of rows, from `first_step` on.

    An epoch has all rows, each once; its last step and micro-batch may have fewer. Draws one number
    from torch's generator at the start of an epoch, as torch's DataLoader does, so that the random
    numbers of a step are those that it had with the Trainer of transformers.
    """
    per_step = micro_batch * accumulated
    steps_of_epoch = -(-count // per_step)
    epoch, step = divmod(first_step, steps_of_epoch)
    while True:
        generator = torch.Generator().manual_seed(seed * 2**20 + epoch)
        order = torch.randperm(count, generator=generator).tolist()
        if step == 0:
            torch.empty((), dtype=torch.int64).random_()
        for start in range(step * per_step, count, per_step):
            rows = order[start : min(start + per_step, count)]
            yield [rows[i : i + micro_batch] for i in range(0, len(rows), micro_batch)]
        epoch, step = epoch + 1, 0


def micro_batches(rows: Sequence[R], args: Any, first_step: int) -> Iterator[list[list[R]]]:
    """Yield the rows of the micro-batches of each step, from `first_step` on.

    `args`: transformers.TrainingArguments, with seed, batch size and gradient accumulation.
    """
    for numbers in row_batches(
        len(rows),
        args.seed,
        micro_batch=args.per_device_train_batch_size,
        accumulated=args.gradient_accumulation_steps,
        first_step=first_step,
    ):
        yield [[rows[number] for number in part] for part in numbers]


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
