"""The order in which a training takes its rows: it depends only on (seed, epoch). Imports torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch


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
