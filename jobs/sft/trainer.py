"""TRL's SFTTrainer on warm parts: resumes exactly, and measures held-out rows.

Imports trl: only `run` of the SFT kind imports it.
"""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pyarrow as pa
import torch
from trl.trainer.sft_config import SFTConfig

from ..context import Context
from ..packing.passes import require_one_process, stored_number
from ..training.options import TrainingSpec
from ..training.row_trainer import RowTrainer
from ..training.tokens import Examples
from .dataset import Example
from .packed_trainer import PackedSftTrainer

EVAL_ROWS = 32  # of one batch of an evaluation


class SupervisedTrainer(RowTrainer, PackedSftTrainer):
    """An SFTTrainer inside a job. `data` identifies the rows: a resume on other rows is refused."""

    model: Any
    held_out: Examples[Example]

    def __init__(
        self,
        *,
        job: Context,
        spec: TrainingSpec,
        config: SFTConfig,
        model: Any,
        tokenizer: Any,
        examples: Examples[Example],
        held_out: Examples[Example],
        data: str,
        eval_every: int,
    ) -> None:
        super().__init__(
            job=job,
            spec=spec,
            model=model,
            args=config,
            processing_class=tokenizer,
            table=_table(examples),
            held_out=held_out,
            data=data,
            eval_every=eval_every,
        )
        if self.most_tokens is not None:
            self.most_tokens = stored_number(
                job.run_dir / "pack_tokens", self.most_tokens, self.ranks
            )
        else:
            require_one_process(self.ranks, model)

    @torch.no_grad()
    def measure(self) -> dict[str, Any] | None:
        """Return loss and token accuracy over the learned tokens held out, or None when stopped."""
        started = time.perf_counter()
        was_training = self.model.training
        self.model.eval()
        loss, right, count = 0.0, 0.0, 0
        by_length = np.argsort(self.held_out.lengths, kind="stable")
        for first in range(0, len(by_length), EVAL_ROWS):
            if self.job.stop.is_set():
                return None
            rows = [self.held_out[number] for number in by_length[first : first + EVAL_ROWS]]
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


def _table(examples: Examples[Example]) -> Any:
    """Return the rows that TRL draws from, memory-mapped."""
    corpus = examples.corpus
    lists = {
        name: pa.LargeListArray.from_arrays(corpus.offsets, pa.array(corpus.columns[column]))
        for name, column in (("input_ids", "ids"), ("labels", "labels"))
    }
    # The examples to train on are the first ones of the corpus.
    return pa.table(lists).slice(0, len(examples))
