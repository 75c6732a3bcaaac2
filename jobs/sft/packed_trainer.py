"""TRL's SFTTrainer without padding: the same loss and gradients, computed on real tokens only.

- The rows of a step are concatenated in packs; each attends only to itself, at positions from 0
  (`jobs.packing`).
- The vocabulary head runs only where there is a loss.
- Tokens after the last one that is learned are left out: nothing depends on them.
- With bf16 on a GPU, matrix multiplications are in bfloat16; weights and sums stay in float32.

A model that cannot be packed exactly is trained by TRL's own padded batches. Imports trl.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from trl.trainer.sft_trainer import SFTTrainer

from ..context import ONE_PROCESS, Ranks
from ..packing.attention import can_pack, causal, packed_attention
from ..packing.passes import Embedded, score_pack, tokens_that_fit
from .dataset import IGNORED

Batch = dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a row and its labels (IGNORED: no loss), up to the last one with a loss."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


class SequencePack:
    """Rows in one sequence of N tokens; `jobs.packing.passes.Pack`.

    The last token of a row is left out: it predicts nothing.
    """

    def __init__(self, rows: Sequence[Tokens], device: torch.device | str = "cpu") -> None:
        ids: list[int] = []
        positions: list[int] = []
        predictors: list[int] = []
        targets: list[int] = []
        self._rows: list[slice] = []
        for row in rows:
            start, count = len(ids), len(row.ids) - 1
            self._rows.append(slice(start, start + count))
            ids += row.ids[:-1]
            positions += range(count)
            learned = [place for place in range(count) if row.labels[place + 1] != IGNORED]
            predictors += [start + place for place in learned]
            targets += [row.labels[place + 1] for place in learned]
        self.ids = torch.tensor([ids], device=device)
        self.positions = torch.tensor([positions], device=device)
        self.predictors = torch.tensor(predictors, dtype=torch.int64, device=device)
        self.targets = torch.tensor(targets, dtype=torch.int64, device=device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the attention mask: each token attends to its row up to itself."""
        return torch.cat([causal(query, key, value, row, scale) for row in self._rows])[None]


def sequences_of(batch: Mapping[str, Tensor]) -> list[Tokens]:
    """Read the rows of a padded batch (input_ids, labels) that have a token to learn."""
    found = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        end = max((i for i, label in enumerate(labels) if label != IGNORED), default=0) + 1
        if end > 1:
            found.append(Tokens(tuple(ids[:end]), tuple(labels[:end])))
    return found


def split(
    rows: Iterable[Tokens], most_tokens: int, ranks: Ranks = ONE_PROCESS
) -> list[list[Tokens]]:
    """Divide rows into packs of at most `most_tokens`, or of one row (first fit, longest first).

    Returns the packs of this rank: each row goes to the rank with the fewest tokens so far. The
    packs do not depend on the order of the rows.
    """
    packs: list[list[Tokens]] = []
    room: list[int] = []  # in each pack
    loads = [0] * ranks.size
    for row in sorted(rows, key=lambda row: (-len(row.ids), row.ids, row.labels)):
        size = len(row.ids) - 1
        rank = loads.index(min(loads))
        loads[rank] += size
        if rank != ranks.rank:
            continue
        fitting = next((i for i, left in enumerate(room) if left >= size), None)
        if fitting is None:
            fitting = len(packs)
            packs.append([])
            room.append(most_tokens)
        packs[fitting].append(row)
        room[fitting] -= size
    return packs


class PackedSftTrainer(SFTTrainer):
    """An SFTTrainer for text whose model computes packs of at most `most_tokens`.

    None where packs are not used.
    """

    model: Any
    args: Any
    ranks: Ranks = ONE_PROCESS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.most_tokens: int | None = None
        if can_pack(self.model):
            self.most_tokens = tokens_that_fit(self.model, self.accelerator.device, self.ranks.size)

    def compute_loss(
        self,
        model: Any,
        inputs: Batch,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        if self.most_tokens is None or return_outputs:
            return cast(Any, super()).compute_loss(
                model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
            )
        rows = sequences_of(inputs)
        learned = sum(label != IGNORED for row in rows for label in row.labels[1:])
        # An evaluation runs on rank 0 alone.
        ranks = self.ranks if model.training else ONE_PROCESS
        num_items = max(float(learned if num_items_in_batch is None else num_items_in_batch), 1.0)
        sums = torch.zeros(3, dtype=torch.float64)
        with packed_attention(self.model):
            for part in split(rows, self.most_tokens, ranks):
                pack = SequencePack(part, self.model.device)
                sums += torch.tensor(self._learn(pack, num_items), dtype=torch.float64)
        ranks.sum(sums)
        loss, nats, top = sums.tolist()
        mode = "train" if model.training else "eval"
        self._metrics[mode]["entropy"].append(nats / max(learned, 1))
        self._metrics[mode]["mean_token_accuracy"].append(top / max(learned, 1))
        if mode == "train":
            self._total_train_tokens += int(inputs["attention_mask"].sum())
            if not rows:  # AdamW treats a zero gradient differently from None
                for weight in self.model.parameters():
                    if weight.requires_grad and weight.grad is None:
                        weight.grad = torch.zeros_like(weight)
        self._metrics[mode]["num_tokens"] = [self._total_train_tokens]
        # A leaf for the backward() of the Trainer: the gradients are computed already.
        return torch.tensor(loss, device=self.model.device, requires_grad=True)

    def _learn(self, pack: SequencePack, num_items: float) -> tuple[float, float, int]:
        """Return a pack's part of the loss, the sum of its entropies, and its correctly predicted
        tokens.

        In training mode its gradients are added to those of the weights.
        """
        learns = self.model.training and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns):
            embedded = Embedded(self.model, pack.ids) if learns else None
            scores = score_pack(
                self.model,
                pack,
                embedded=None if embedded is None else embedded.output,
                is_half=self.args.bf16,
                wants_top=True,
            )
            loss = -scores.logps.sum() / num_items
        if embedded is not None:
            self.accelerator.backward(loss)
            embedded.finish()
        return float(loss.detach()), float(scores.entropies.sum()), int(scores.is_top.sum())
