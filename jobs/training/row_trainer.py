"""Trainer on the rows of a file: a reproducible order, and resume on the same rows only.

Imports torch and transformers: only `run` of a kind imports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from torch.utils.data import Sampler

from ..errors import JobFailed
from .evaluation import EvaluatingTrainer
from .snapshot import read_job_state


class EpochOrder(Sampler[int]):
    """The rows of every epoch, in an order that depends only on (seed, epoch)."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; called by the Trainer."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 2**20 + self.epoch)
        yield from torch.randperm(self.count, generator=generator).tolist()


class RowTrainer(EvaluatingTrainer):
    """An EvaluatingTrainer on rows, mixed in before a trainer of TRL that counts tokens.

    `table`: the training rows, a pyarrow.Table. `held_out`: the rows that `measure` evaluates.
    `data` identifies all of them: a resume on other rows is refused.
    """

    model: Any
    most_tokens: int | None  # of a pack; None: padded batches
    _total_train_tokens: int

    def __init__(
        self,
        *,
        table: Any,
        held_out: Sequence[Any],
        data: str,
        eval_every: int,
        **kwargs: Any,
    ) -> None:
        self.data = data
        self.held_out = held_out
        self.before: dict[str, Any] | None = None  # the evaluation before the first step
        self._tokens = 0  # trained on, at the end of the previous step
        super().__init__(
            # Without a fingerprint the rows would be pickled to compute one.
            train_dataset=Dataset(InMemoryTable(table), fingerprint=data),
            eval_every=eval_every if held_out else None,
            **kwargs,
        )

    def _send_telemetry(self) -> None:
        """Send no telemetry."""

    # Exact resume.

    def _get_train_sampler(self, dataset: Any = None) -> EpochOrder:
        rows = cast(Any, self.train_dataset if dataset is None else dataset)
        return EpochOrder(len(rows), self.args.seed)

    def job_state(self) -> dict[str, Any]:
        return {
            **super().job_state(),
            "data": self.data,
            "tokens": self._total_train_tokens,
            "before": self.before,
        }

    def check_checkpoint(self, checkpoint: Path) -> None:
        super().check_checkpoint(checkpoint)
        if read_job_state(checkpoint)["data"] != self.data:
            raise JobFailed("dataset: its rows are not those that the checkpoint was trained on")

    def load_job_state(self, state: dict[str, Any]) -> None:
        super().load_job_state(state)
        self._total_train_tokens = self._tokens = state["tokens"]
        self.before = state["before"]

    # Events.

    def step_fields(self, logs: dict[str, Any]) -> dict[str, Any]:
        tokens, self._tokens = self._total_train_tokens - self._tokens, self._total_train_tokens
        return {
            **super().step_fields(logs),
            "mean_token_accuracy": logs["mean_token_accuracy"],
            "entropy": logs["entropy"],
            "tokens": int(tokens),
            "seconds": self.step_seconds(),
        }
