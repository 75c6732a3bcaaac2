"""Training objectives: MLM on text with any masked LM, MLM + MNM with the code-graph encoder.

An objective collates examples into batches and computes losses from outputs; it is stateless.
Imports torch: only `run` of the MLM kind imports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from ..codegraph.sequences import IGNORED, PAD_ID, Example, leaf_tail
from ..errors import JobFailed
from ..models.architectures import must_fill_masks
from .masking import Masker

Array = NDArray[Any]
Sample = dict[str, Array]
Batch = dict[str, Tensor]


class Objective(Protocol):
    """How an example is masked, how examples become a batch, and the loss.

    A sample has `input_ids` and, by part, `mlm_labels` and `mnm_labels`: (T,) int64, IGNORED where
    nothing is masked. A batch has them as (B, T) int64 tensors, with `attention_mask`.
    """

    parts: tuple[str, ...]  # of the loss: mlm, mnm, constraint

    def mask(self, example: Mapping[str, Array], epoch: int, number: int) -> Sample:
        """Mask an example; deterministic in `epoch` and `number`."""

    def collate(self, rows: Sequence[Sample]) -> Batch:
        """Pad examples to one batch."""

    def losses(self, model: Any, batch: Batch, counts: Mapping[str, int]) -> dict[str, Tensor]:
        """Return the loss by part: this batch's share of the mean over the whole step.

        `counts`: the labels of the step by part, and its examples ("rows").
        """

    def logits(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        """Return the logits at the labels, by part: (n, V)."""


class TextObjective:
    """Masked language modeling with any model of transformers (Devlin et al., arXiv:1810.04805).

    The vocabulary head runs at masked tokens only, where it is position-wise.
    """

    parts: tuple[str, ...] = ("mlm",)

    def __init__(self, model: Any, tokenizer: Any, masker: Masker) -> None:
        """Raises JobFailed for a model that gives no logits of tokens."""
        self.masker = masker
        self._special = np.array(sorted(tokenizer.all_special_ids))
        self._fill = {"input_ids": tokenizer.pad_token_id or 0, "mlm_labels": IGNORED}
        self._chosen: Tensor | None = None  # positions in (B * T,) that the head is to see
        base = model.base_model
        self.is_sparse = False
        _check_head(model)
        if base is not model:
            base.register_forward_hook(self._choose)
            self.is_sparse = self._head_is_positionwise(model)

    def mask(self, example: Mapping[str, Array], epoch: int, number: int) -> Sample:
        ids = example["ids"]
        is_special = np.isin(ids, self._special)
        masked = self.masker.text(ids, is_special, epoch=epoch, index=number)
        return {"input_ids": masked.ids, "mlm_labels": masked.mlm_labels}

    def collate(self, rows: Sequence[Sample]) -> Batch:
        return pad(rows, self._fill)

    def losses(self, model: Any, batch: Batch, counts: Mapping[str, int]) -> dict[str, Tensor]:
        logits = self.logits(model, batch)["mlm"]
        return {"mlm": sum_of_losses(logits, targets(batch, "mlm")) / max(counts["mlm"], 1)}

    def logits(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        at = (batch["mlm_labels"] != IGNORED).flatten().nonzero()[:, 0]
        return {"mlm": self._logits_at(at, model, batch, sparse=self.is_sparse)}

    def _logits_at(self, at: Tensor, model: Any, batch: Batch, *, sparse: bool) -> Tensor:
        self._chosen = at if sparse else None
        logits: Tensor = model(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).logits
        self._chosen = None
        return logits[0] if sparse else logits.flatten(0, 1)[at]

    def _choose(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Forward hook: keep only the chosen positions between the encoder and its head."""
        if self._chosen is not None and "last_hidden_state" in output:
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[self._chosen][None]
        return output

    def _head_is_positionwise(self, model: Any) -> bool:
        """Check that the head gives equal logits with and without the other positions."""
        batch = _trial(model)
        at = torch.tensor([1, 6], device=model.device)
        with torch.no_grad():
            dense = self._logits_at(at, model, batch, sparse=False)
            sparse = self._logits_at(at, model, batch, sparse=True)
        return sparse.shape == dense.shape and torch.allclose(sparse, dense, rtol=1e-3, atol=1e-4)


def _check_head(model: Any) -> None:
    batch = _trial(model)
    with torch.no_grad():
        logits = getattr(model(**batch), "logits", None)
    if logits is None or logits.shape[:-1] != batch["input_ids"].shape:
        problem = must_fill_masks(model.config.model_type, type(model).__name__)
        raise JobFailed(f"model: {problem}")


def _trial(model: Any) -> Batch:
    """Return a batch of eight tokens, to probe a model with."""
    model.eval()
    ids = torch.arange(8, device=model.device).reshape(2, 4)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class GraphObjective:
    """MLM, masked node modeling and the constraint loss of the code-graph encoder."""

    parts: tuple[str, ...]

    def __init__(self, masker: Masker, *, has_constraint: bool) -> None:
        self.masker = masker
        self.parts = ("mlm", "mnm", "constraint") if has_constraint else ("mlm", "mnm")

    def mask(self, example: Mapping[str, Array], epoch: int, number: int) -> Sample:
        masked = self.masker.graph(
            example["ids"], example["rel_ids"], example["role_ids"], epoch=epoch, index=number
        )
        labels = {"mlm_labels": masked.mlm_labels, "mnm_labels": masked.mnm_labels}
        return {**self._unmasked(example), "input_ids": masked.ids, **labels}

    def hide_leaf(self, example: Mapping[str, Array]) -> tuple[Sample, Array]:
        """Mask only the tail of the triple at the end; return the sample and the tail's ids."""
        row = self._unmasked(example)
        tail = leaf_tail(Example(**example))
        true = row["input_ids"][tail]
        nothing = np.full_like(row["input_ids"], IGNORED)
        row |= {"mlm_labels": nothing, "mnm_labels": nothing.copy()}
        row["mnm_labels"][tail] = true
        row["input_ids"] = row["input_ids"].copy()
        row["input_ids"][tail] = self.masker.mask_id
        return row, true

    def collate(self, rows: Sequence[Sample]) -> Batch:
        fill = {"input_ids": PAD_ID, "mlm_labels": IGNORED, "mnm_labels": IGNORED}
        return pad(rows, fill)

    def losses(self, model: Any, batch: Batch, counts: Mapping[str, int]) -> dict[str, Tensor]:
        # A step may have no label of a part, and then its loss is 0.
        output = model(
            **batch,
            constraint_weight=float("constraint" in self.parts),
            num_mlm=max(counts["mlm"], 1),
            num_mnm=max(counts["mnm"], 1),
            num_rows=counts["rows"],
        )
        return {part: output[f"{part}_loss"] for part in self.parts}

    def logits(self, model: Any, batch: Batch) -> dict[str, Tensor]:
        output = model(**batch, constraint_weight=0.0)
        return {"mlm": output.mlm_logits, "mnm": output.mnm_logits}

    def _unmasked(self, example: Mapping[str, Array]) -> Sample:
        columns = {name: column.astype(np.int64) for name, column in example.items()}
        return {"input_ids": columns.pop("ids"), **columns}


def pad(rows: Sequence[Sample], fill: Mapping[str, int]) -> Batch:
    """Return (B, T) int64 tensors, padded on the right with the value in `fill`, else with 0."""
    length = max(len(row["input_ids"]) for row in rows)
    padded = {
        name: np.full((len(rows), length), fill.get(name, 0), np.int64)
        for name in (*rows[0], "attention_mask")
    }
    for i, row in enumerate(rows):
        for name, values in row.items():
            padded[name][i, : len(values)] = values
        padded["attention_mask"][i, : len(row["input_ids"])] = 1
    return {name: torch.from_numpy(array) for name, array in padded.items()}


def targets(batch: Batch, part: str) -> Tensor:
    """Return the true tokens under the masks of a part: (n,), row by row."""
    labels: Tensor = batch[f"{part}_labels"]
    return labels[labels != IGNORED]


def sum_of_losses(logits: Tensor, true: Tensor) -> Tensor:
    """Return the summed cross-entropy of all targets: (n, V), (n,) -> ()."""
    return F.cross_entropy(logits.float(), true, reduction="sum")
