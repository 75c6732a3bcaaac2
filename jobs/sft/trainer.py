"""TRL's SFTTrainer on warm parts: resumes exactly, and measures held-out rows.

Imports trl: only `run` of the SFT kind imports it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from datasets import Dataset
from datasets.table import InMemoryTable
from torch.utils.data import Sampler
from trl.trainer.sft_config import SFTConfig

from ..context import Context
from ..errors import JobFailed
from ..packing.passes import stored_number
from ..training.evaluation import EvaluatingTrainer
from ..training.options import TrainingSpec
from ..training.snapshot import read_job_state
from .dataset import Example
from .packed_trainer import PackedSftTrainer

EVAL_ROWS = 32  # of one batch of an evaluation


class EpochOrder(Sampler[int]):
    """The rows of every epoch in an order that follows from (seed, epoch) alone."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose order comes next; the Trainer calls it."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 2**20 + self.epoch)
        yield from torch.randperm(self.count, generator=generator).tolist()


class SupervisedTrainer(EvaluatingTrainer, PackedSftTrainer):
    """An SFTTrainer inside a job. `data` identifies the rows: a resume on others is refused."""

    model: Any
    _total_train_tokens: int

    def __init__(
        self,
        *,
        job: Context,
        spec: TrainingSpec,
        config: SFTConfig,
        model: Any,
        tokenizer: Any,
        examples: Sequence[Example],
        held_out: Sequence[Example],
        data: str,
        eval_every: int,
    ) -> None:
        self.data = data
        self.held_out = held_out
        self.before: dict[str, Any] | None = None  # the evaluation before the first step
        self._tokens = 0  # trained on, at the end of the step before
        super().__init__(
            job=job,
            spec=spec,
            model=model,
            args=config,
            processing_class=tokenizer,
            train_dataset=_dataset(examples, data),
            eval_every=eval_every if held_out else None,
        )
        if self.most_tokens is not None:
            self.most_tokens = stored_number(job.run_dir / "pack_tokens", self.most_tokens)

    def _send_telemetry(self) -> None:
        """Send nothing to anybody."""

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

    # Evaluation.

    @torch.no_grad()
    def measure(self) -> dict[str, Any] | None:
        """Return loss and token accuracy over all learned tokens held out, or None when stopped."""
        started = time.perf_counter()
        was_training = self.model.training
        self.model.eval()
        loss, right, count = 0.0, 0.0, 0
        by_length = sorted(self.held_out, key=lambda example: len(example.ids))
        for first in range(0, len(by_length), EVAL_ROWS):
            if self.job.stop.is_set():
                return None
            rows = by_length[first : first + EVAL_ROWS]
            of_batch = sum(example.num_learned for example in rows)
            batch = cast(Any, self.data_collator)(
                [{"input_ids": row.ids, "labels": row.labels} for row in rows]
            )
            mean = self.compute_loss(self.model, cast(Any, self._prepare_inputs(batch)))
            loss += float(mean) * of_batch
            right += self._metrics["eval"]["mean_token_accuracy"][-1] * of_batch
            count += of_batch
        self._metrics["eval"].clear()
        self.model.train(was_training)
        return {
            "loss": loss / max(count, 1),
            "mean_token_accuracy": right / max(count, 1),
            "n": len(by_length),
            "eval_s": time.perf_counter() - started,
        }


def _dataset(examples: Sequence[Example], data: str) -> Dataset:
    """Return the rows that TRL draws from. Without a fingerprint they would be pickled for one."""
    columns = {
        "input_ids": [example.ids for example in examples],
        "labels": [example.labels for example in examples],
    }
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=data)
