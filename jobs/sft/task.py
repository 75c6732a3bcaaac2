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
from torch import Tensor
from trl.trainer.sft_config import SFTConfig

from ..context import ONE_PROCESS, Context, Ranks
from ..errors import JobFailed
from ..sequences.attention import packed_attention
from ..sequences.logprobs import Scores, score_logits
from ..sequences.padding import ROUNDED
from ..sequences.passes import Embedded, score_pack
from ..training.arguments import counts_first_tokens
from ..training.loop import Loss
from ..training.row_order import micro_batches
from ..training.tokens import Examples
from .dataset import IGNORED, Example
from .packs import SequencePack, split, trimmed

EVAL_ROWS = 32  # of one batch of an evaluation


@dataclass(frozen=True)
class MicroBatch:
    """Rows that are learned from together, and what their losses are divided by."""

    rows: Sequence[Example]
    step_learned: int  # tokens with a loss, of the whole step
    share: float  # of this micro-batch in a mean over those of a step

    def sums(self, scores: Scores) -> dict[str, float]:
        """Return what scored tokens add to the metrics, which are means over micro-batches."""
        weight = self.share / max(sum(row.num_learned for row in self.rows), 1)
        return {
            "mean_token_accuracy": weight * float(scores.is_top.sum()),
            "entropy": weight * float(scores.entropies.sum()),
        }


class Supervised:
    """The task of an SFT job (training.loop.Task, training.loop.Measured).

    `most_tokens`: of a pack; None: padded batches. `data` identifies the rows. `args`: a SFTConfig.
    """

    def __init__(
        self,
        *,
        ctx: Context,
        args: SFTConfig,
        model: Any,
        pad_id: int,
        examples: Sequence[Example],
        held_out: Examples[Example],
        data: str,
        most_tokens: int | None,
    ) -> None:
        self.most_tokens = most_tokens
        self._ctx = ctx
        self._args: Any = args
        self._model = model
        self._pad_id = pad_id
        self._examples = examples
        self._held_out = held_out
        self._data = data
        # Rows of packs never count a token that none predicts.
        self._first = 0 if most_tokens is None and counts_first_tokens(model) else 1

    def batches(self, first_step: int) -> Iterator[Sequence[MicroBatch]]:
        for parts in micro_batches(self._examples, self._args, first_step):
            labels = (
                label for part in parts for row in part for label in row.labels[self._first :]
            )
            learned = sum(label != IGNORED for label in labels)
            yield [MicroBatch(part, max(learned, 1), 1 / len(parts)) for part in parts]

    def loss(self, micro_batch: MicroBatch) -> Iterator[Loss]:
        if self.most_tokens is None:
            yield self._loss_of_padded(micro_batch)
        else:
            yield from self._losses_of_packs(micro_batch, self.most_tokens, self._ctx.ranks)

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
        return [ROUNDED] if rules < 2 and self.most_tokens is None else []

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
            for part in self._measured(MicroBatch(rows, max(learned, 1), 1.0)):
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

    def _measured(self, batch: MicroBatch) -> Iterator[Loss]:
        """Yield the losses of held-out rows, which rank 0 alone computes."""
        if self.most_tokens is None:
            yield self._loss_of_padded(batch)
        else:
            yield from self._losses_of_packs(batch, self.most_tokens, ONE_PROCESS)

    def _losses_of_packs(self, batch: MicroBatch, most_tokens: int, ranks: Ranks) -> Iterator[Loss]:
        learns = torch.is_grad_enabled()
        with packed_attention(self._model):
            for rows in split(trimmed(batch.rows), most_tokens, ranks):
                pack = SequencePack(rows, self._model.device)
                embedded = Embedded(self._model, pack.ids) if learns else None
                scores = score_pack(
                    self._model,
                    pack,
                    embedded=None if embedded is None else embedded.output,
                    is_half=self._args.bf16,
                    wants_top=True,
                )
                yield Loss(-scores.logps.sum() / batch.step_learned, batch.sums(scores))
                if embedded is not None:
                    embedded.finish()

    def _loss_of_padded(self, batch: MicroBatch) -> Loss:
        ids, is_token, labels = self._padded(batch.rows)
        routes = getattr(self._model.config.get_text_config(), "output_router_logits", False)
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=self._args.bf16):
            output = self._model(
                input_ids=ids,
                attention_mask=is_token,
                use_cache=False,
                **({"output_router_logits": True} if routes else {}),
            )
        is_learned = labels[:, 1:] != IGNORED
        scores = score_logits(output.logits[:, :-1][is_learned], labels[:, 1:][is_learned])
        loss = -scores.logps.sum() / batch.step_learned
        if routes:  # the balance of a mixture of experts, a mean over the micro-batch
            loss = loss + self._args.router_aux_loss_coef * output.aux_loss * batch.share
        return Loss(loss, batch.sums(scores))

    def _padded(self, rows: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
        """Return ids, attention mask and labels of rows, (rows, longest), padded on the right."""
        longest = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), longest), self._pad_id)
        is_token = torch.zeros_like(ids)
        labels = torch.full_like(ids, IGNORED)
        for number, row in enumerate(rows):
            ids[number, : len(row.ids)] = torch.tensor(row.ids)
            is_token[number, : len(row.ids)] = 1
            labels[number, : len(row.ids)] = torch.tensor(row.labels)
        device = self._model.device
        return ids.to(device), is_token.to(device), labels.to(device)
