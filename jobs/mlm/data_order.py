"""The data of each MLM step: its examples, their order and their masks.

All follow from (seed, step) by counter-based random numbers (Philox; Salmon et al. 2011), so that a
resumed job has the same data as an uninterrupted one. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset

from ..context import ONE_PROCESS, Ranks
from ..data.corpus import Corpus
from ..training.epochs import Epochs
from .objectives import Objective, Sample

Array = NDArray[Any]

VALIDATION_EPOCH = 2**32 - 1  # the epoch of the fixed validation masks
WINDOW = 32  # steps within which examples are sorted by length
_ORDER = 2**63  # first key for the order, distinct from the keys of masks


class StepOrder:
    """The examples of every step in micro-batches, reshuffled in every epoch.

    The examples of a step depend on their number, not on the split into micro-batches. The
    remainder of an epoch is dropped. Each of several `ranks` has a part of every micro-batch.
    """

    def __init__(
        self,
        lengths: Array,
        *,
        micro_batch: int,
        accumulation: int,
        seed: int,
        ranks: Ranks = ONE_PROCESS,
    ) -> None:
        self.ranks = ranks
        self.lengths = lengths
        self.micro_batch = micro_batch
        self.accumulation = accumulation
        self.seed = seed

    def steps_from(self, first_step: int) -> Iterator[list[list[tuple[int, int]]]]:
        """Yield the micro-batches of each step, as (epoch, index), from `first_step` (0) on."""
        per_step = self.micro_batch * self.accumulation
        epochs = Epochs(
            lambda epoch: self.order_of_epoch(epoch).ravel(),
            len(self.lengths),
            per_step,
            drops_rest=True,
        )
        for step in count(first_step):
            epoch, examples = epochs.at(step)
            parts = examples.reshape(self.accumulation, self.micro_batch)
            own = [np.array_split(part, self.ranks.size)[self.ranks.rank] for part in parts]
            yield [[(epoch, int(index)) for index in part] for part in own]

    def order_of_epoch(self, epoch: int) -> Array:
        """Return the indices of an epoch, each at most once: (steps, examples per step)."""
        per_step = self.micro_batch * self.accumulation
        key = np.array([self.seed, _ORDER + epoch], np.uint64)
        generator = np.random.Generator(np.random.Philox(key=key))
        shuffled = generator.permutation(len(self.lengths))
        shuffled = shuffled[: len(shuffled) // per_step * per_step]
        steps = []
        for begin in range(0, len(shuffled), WINDOW * per_step):
            window = shuffled[begin : begin + WINDOW * per_step]
            by_length = window[np.argsort(self.lengths[window], kind="stable")]
            steps.append(generator.permutation(by_length.reshape(-1, per_step)))
        return np.concatenate(steps)


class MaskedExamples(Dataset[Sample]):
    """A subset of a corpus, masked by (epoch, index)."""

    def __init__(self, corpus: Corpus, numbers: Array, objective: Objective) -> None:
        self.corpus = corpus
        self.numbers = numbers
        self.objective = objective

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, item: tuple[int, int]) -> Sample:
        epoch, index = item
        number = int(self.numbers[index])
        return self.objective.mask(self.corpus.example(number), epoch, number)
