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
from transformers import TrainerCallback
from trl.trainer.sft_config import SFTConfig

from ..context import Context
from ..errors import JobFailed, Stopped
from ..packing.passes import stored_number
from ..training.options import TrainingSpec
from ..training.snapshot import read_job_state
from ..training.trainer import JobTrainer
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


class SupervisedTrainer(JobTrainer, PackedSftTrainer):
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
        self.eval_every = eval_every
        self.before: dict[str, Any] | None = None  # the evaluation before the first step
        self.last_eval: dict[str, Any] | None = None  # the fields of the latest eval event
        self._eval_step: int | None = None  # whose weights it measured, if in this execution
        self._eval_is_due = False
        self._tokens = 0  # trained on, at the end of the step before
        super().__init__(
            job=job,
            spec=spec,
            model=model,
            args=config,
            processing_class=tokenizer,
            train_dataset=_dataset(examples, data),
        )
        if self.most_tokens is not None:
            self.most_tokens = stored_number(job.run_dir / "pack_tokens", self.most_tokens)
        self.add_callback(_EvalSchedule(self))

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
            "last_eval": self.last_eval,
            "eval_is_due": self._eval_is_due,
        }

    def check_checkpoint(self, checkpoint: Path) -> None:
        super().check_checkpoint(checkpoint)
        if read_job_state(checkpoint)["data"] != self.data:
            raise JobFailed("dataset: its rows are not those that the checkpoint was trained on")

    def load_job_state(self, state: dict[str, Any]) -> None:
        super().load_job_state(state)
        self._total_train_tokens = self._tokens = state["tokens"]
        self.before = state["before"]
        self.last_eval = state["last_eval"]
        self._eval_is_due = state["eval_is_due"]

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

    def metrics(self) -> dict[str, Any]:
        """Return those of the step, and as `eval_…` an evaluation of these very weights."""
        found = (self.last_eval or {}) if self._eval_step == self.state.global_step else {}
        return {**super().metrics(), **{f"eval_{name}": value for name, value in found.items()}}

    # Evaluation.

    def train_to_end(self, checkpoint: Path | None) -> None:
        super().train_to_end(checkpoint)
        self.evaluate_if_due()

    def evaluate_if_due(self) -> None:
        """Make up for the evaluation that a stop has put off. Raises Stopped."""
        if self._eval_is_due:
            self._evaluate()
            if self.was_stopped:
                raise Stopped(self.state.global_step)

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Measure the model at this step; or put it off when stopped."""
        self._eval_is_due = True
        self.control.should_evaluate = False  # or the end of the training would ask once more
        found = self.measure()
        if found is None:
            self.was_stopped = True
            self.control.should_save = self.control.should_training_stop = True
            return
        self._eval_is_due = False
        self.last_eval, self._eval_step = found, self.state.global_step
        is_last = self.state.global_step >= self.args.max_steps
        self.job.emit(
            "eval", step=self.state.global_step, phase="after" if is_last else "during", **found
        )

    def evaluate_before(self) -> None:
        """Measure the weights that the training begins with. Raises Stopped when asked to."""
        found = self.measure()
        if found is None:
            raise Stopped(0)
        self.before = found
        self.job.emit("eval", step=0, phase="before", **found)

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


class _EvalSchedule(TrainerCallback):
    """Asks for an evaluation where one is due."""

    def __init__(self, trainer: SupervisedTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.evaluate_if_due()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer.held_out:
            every = self.trainer.eval_every
            is_last = state.global_step >= args.max_steps
            control.should_evaluate = is_last or (every and state.global_step % every == 0)


def _dataset(examples: Sequence[Example], data: str) -> Dataset:
    """Return the rows that TRL draws from. Without a fingerprint they would be pickled for one."""
    columns = {
        "input_ids": [example.ids for example in examples],
        "labels": [example.labels for example in examples],
    }
    return Dataset(InMemoryTable.from_pydict(columns), fingerprint=data)
