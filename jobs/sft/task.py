"""What SFT computes: the cross entropy of the learned tokens of its rows (training.loop.Task).

The rows of a step are concatenated in packs, without padding: each row attends only to itself, the
vocabulary head runs only where there is a loss, and the tokens after the last learned one are left
out. A model that cannot be packed exactly gets padded batches. Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from trl.trainer.sft_config import SFTConfig

from ..context import ONE_PROCESS, Context, Ranks
from ..errors import JobFailed
from ..sequences.logprobs import Scores
from ..sequences.padding import ROUNDED
from ..sequences.scoring import Scorer
from ..sequences.sequence import Sequence as Tokens
from ..training.arguments import counts_first_tokens
from ..training.loop import Loss
from ..training.row_order import micro_batches
from ..training.tokens import Examples
from .dataset import Example

EVAL_ROWS = 32  # of one batch of an evaluation


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are learned from together, and what their losses are divided by."""

    rows: Sequence[Example]
    step_learned: int  # tokens with a loss, of the whole step
    share: float  # of this micro-batch in a mean over those of a step

    @property
    def sequences(self) -> list[Tokens]:
        """The rows; nothing predicts the first token of one."""
        return [
            Tokens(tuple(row.ids), (0.0, *map(float, row.learned[1:])), number)
            for number, row in enumerate(self.rows)
            if row.num_learned
        ]

    def sums(self, scores: Scores) -> dict[str, float]:
        """Return what scored tokens add to the metrics, which are means over micro-batches."""
        weight = self.share / max(sum(row.num_learned for row in self.rows), 1)
        return {
            "mean_token_accuracy": weight * float(scores.is_top.sum()),
            "entropy": weight * float(scores.entropies.sum()),
        }


class Supervised:
    """The task of an SFT job (training.loop.Task, training.loop.Measured).

    `data` identifies the rows. `args`: a SFTConfig.
    """

    def __init__(
        self,
        *,
        ctx: Context,
        args: SFTConfig,
        model: Any,
        scorer: Scorer,
        examples: Sequence[Example],
        held_out: Examples[Example],
        data: str,
    ) -> None:
        self.scorer = scorer
        self._ctx = ctx
        self._args: Any = args
        self._model = model
        self._examples = examples
        self._held_out = held_out
        self._data = data
        # Rows of packs never count a token that none predicts.
        is_padded = scorer.most_tokens is None
        self._first = 0 if is_padded and counts_first_tokens(model) else 1

    def batches(self, first_step: int) -> Iterator[Sequence[MicroBatch]]:
        for parts in micro_batches(self._examples, self._args, first_step):
            learned = sum(sum(row.learned[self._first :]) for part in parts for row in part)
            yield [MicroBatch(part, max(learned, 1), 1 / len(parts)) for part in parts]

    def loss(self, micro_batch: MicroBatch) -> Iterator[Loss]:
        yield from self._losses(micro_batch, self._ctx.ranks)

    def fields(self, batch: Sequence[MicroBatch], sums: Mapping[str, float]) -> dict[str, Any]:
        return {
            "mean_token_accuracy": sums.get("mean_token_accuracy", 0.0),
            "entropy": sums.get("entropy", 0.0),
            "tokens": sum(len(row.ids) for part in batch for row in part.rows),
        }

    def state(self) -> dict[str, Any]:
        return {"data": self._data}

    def load(self, state: Mapping[str, Any]) -> None:
        if state["data"] != self._data:
            raise JobFailed("dataset: its rows are not those that the checkpoint was trained on")

    def differences_since(self, rules: int) -> list[str]:
        """Return how results differ from those of a version with these RULES."""
        return [ROUNDED] if rules < 2 and self.scorer.most_tokens is None else []

    @torch.no_grad()
    def measure(self) -> dict[str, Any] | None:
        """Return loss and token accuracy over the learned tokens held out, or None when stopped."""
        started = time.perf_counter()
        was_training = self._model.training
        self._model.eval()
        loss, right, count = 0.0, 0.0, 0
        by_length = np.argsort(self._held_out.lengths, kind="stable")
        for first in range(0, len(by_length), EVAL_ROWS):
            if self._ctx.stop.is_set():
                return None
            rows = [self._held_out[number] for number in by_length[first : first + EVAL_ROWS]]
            learned = sum(row.num_learned for row in rows)
            # Rank 0 alone computes them.
            for part in self._losses(MicroBatch(rows, max(learned, 1), 1.0), ONE_PROCESS):
                loss += float(part.value) * learned
                right += part.sums["mean_token_accuracy"] * learned
            count += learned
        self._model.train(was_training)
        return {
            "loss": loss / max(count, 1),
            "mean_token_accuracy": right / max(count, 1),
            "n": len(by_length),
            "eval_s": time.perf_counter() - started,
        }

    def evaluated(self, found: dict[str, Any]) -> None:
        """Nothing depends on an evaluation."""

    def _losses(self, batch: MicroBatch, ranks: Ranks) -> Iterator[Loss]:
        model, scorer = self._model, self.scorer
        parts = scorer.parts([(one,) for one in batch.sequences], model.device, ranks)
        for one in scorer.scored(model, parts):
            loss = -(one.part.weights * one.scores.logps).sum() / batch.step_learned
            if one.balance is not None:  # a mean over the micro-batch
                loss = loss + one.balance * batch.share
            yield Loss(loss, batch.sums(one.scores))
