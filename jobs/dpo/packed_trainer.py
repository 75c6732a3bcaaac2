"""TRL's DPOTrainer without padding: the same losses and gradients with less computation.

- Both completions of a pair share one prompt in a pack (`jobs.packing`): the prompt is
  computed once, nothing is padded, and the vocabulary head runs at completion tokens only.
- The reference model is computed on the same packs: with equal weights every reward is exactly 0.
- The loss is TRL's own code, called with the log-probabilities. Micro-batches stay as they are,
  since a loss is a mean over the pairs of its micro-batch.
- With bf16, on a GPU, matrix multiplications are in bfloat16; weights and sums stay in float32.

A model that cannot be packed exactly is trained by TRL's own padded batches. Imports trl.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from trl.trainer.dpo_trainer import DPOTrainer

from ..context import ONE_PROCESS, Ranks
from ..packing.attention import can_pack, packed_attention
from ..packing.logprobs import Scores
from ..packing.passes import Embedded, exchange, score_pack, tokens_that_fit
from ..packing.shared_prompts import Pack, Sample, split
from ..training.deprecations import no_deprecations
from ..training.reference import CopyBeforeUpdate, copy_shared_weights

Batch = dict[str, Any]

_SORTING = {"aot", "aot_unpaired"}  # losses in which the pairs of a batch depend on each other
_UNKNOWN = ("logits/chosen", "logits/rejected")  # metrics that would need all logits


@dataclass(frozen=True)
class _Outputs:
    """Outputs of a model for TRL's loss, for 2B padded sequences of T tokens: (2B, T - 1) each."""

    log_probs: Tensor
    entropy: Tensor
    is_top1: Tensor
    mean_logits: Tensor

    def put(self, at: tuple[Tensor, Tensor], scores: Scores) -> None:
        """Set the scores of completion tokens."""
        self.log_probs[at] = scores.logps.detach()
        self.entropy[at] = scores.entropies
        self.is_top1[at] = scores.is_top

    def exchange(self, places: Sequence[tuple[Tensor, Tensor]], ranks: Ranks) -> None:
        """Set the scores of the other ranks' tokens; `places`: of this rank's."""
        exchange(places, (self.log_probs, self.entropy, self.is_top1), ranks)


class PackedDpoTrainer(DPOTrainer):
    """A DPOTrainer for rows of prompt_ids, chosen_ids and rejected_ids, with a reference model.

    The model may share its weights with the reference (`training.reference`), or is a PeftModel,
    and the reference (None) is the model without its adapter. `most_tokens` is the maximum size of
    a pack in tokens; None: no packing.
    """

    model: Any
    ref_model: Any
    args: Any
    ranks: Ranks = ONE_PROCESS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.ref_model is None:
            # TRL adds a copy of a new adapter; without any, the model computes the same.
            self.model.delete_adapter("ref")
        else:
            self.add_callback(CopyBeforeUpdate(self.model, self.ref_model))
        self.most_tokens: int | None = None
        if can_pack(self.model):
            self.most_tokens = tokens_that_fit(self.model, self.accelerator.device, self.ranks.size)
            self.precompute_ref_logps = True  # the loss finds them in the batch

    def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        return dataset  # the rows are tokens already

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.ref_model is not None:
            copy_shared_weights(self.model, self.ref_model)
        cast(Any, super())._load_from_checkpoint(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: Batch, return_outputs: bool = False) -> Any:
        if self.most_tokens is None:
            with no_deprecations():
                return cast(Any, super())._compute_loss(model, inputs, return_outputs)
        pairs = pairs_of(inputs)
        device = inputs["input_ids"].device
        # An evaluation runs on rank 0 alone.
        ranks = self.ranks if self.model.training else ONE_PROCESS
        packs = [Pack(part, device) for part in split(pairs, self.most_tokens, ranks)]
        begins = torch.tensor(
            [len(pair[side].prompt) for side in (0, 1) for pair in pairs], device=device
        )
        places = [(pack.rows, begins[pack.rows] - 1 + pack.columns) for pack in packs]
        outputs = self._reference_outputs(inputs, packs, places)
        outputs.exchange(places, ranks)
        chosen, rejected = outputs.log_probs.sum(1).chunk(2)
        inputs = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
        learns = self.model.training and torch.is_grad_enabled()
        with packed_attention(self.model):
            sorts = _SORTING & set(self.loss_types) and (len(packs) > 1 or ranks.size > 1)
            if not learns or sorts:
                for pack, at in zip(packs, places, strict=True):
                    outputs.put(at, self._scores(self.model, pack))
                outputs.exchange(places, ranks)
            if learns:
                for pack, at in zip(packs, places, strict=True):
                    self._learn(inputs, outputs, pack, at)
                outputs.exchange(places, ranks)
        mode = "train" if self.model.training else "eval"
        with torch.no_grad():
            loss: Tensor = self._loss(inputs, outputs)
        for name in _UNKNOWN:
            self._metrics[mode].pop(name)
        # A leaf for the backward() of the Trainer: the gradients are computed already.
        return loss.requires_grad_(learns)

    def _reference_outputs(
        self, inputs: Batch, packs: Sequence[Pack], places: Sequence[tuple[Tensor, Tensor]]
    ) -> _Outputs:
        """Return the scores of the reference model."""
        like = inputs["input_ids"][:, 1:]
        zeros = torch.zeros(like.shape, device=like.device)
        outputs = _Outputs(
            log_probs=zeros.clone(),
            entropy=zeros.clone(),
            is_top1=torch.zeros_like(like, dtype=torch.bool),
            mean_logits=zeros,
        )
        is_adapter = self.ref_model is None
        reference = self.model if is_adapter else self.ref_model
        without_adapter = self.model.disable_adapter() if is_adapter else nullcontext()
        with packed_attention(reference), without_adapter, no_deprecations():
            for pack, at in zip(packs, places, strict=True):
                outputs.put(at, self._scores(reference, pack))
        return outputs

    @torch.no_grad()
    def _scores(self, model: Any, pack: Pack) -> Scores:
        return score_pack(model, pack, is_half=self.args.bf16, wants_top=True)

    def _learn(
        self, inputs: Batch, outputs: _Outputs, pack: Pack, at: tuple[Tensor, Tensor]
    ) -> None:
        """Add the gradients of one pack; its scores go into `outputs`.

        The log-probabilities of other packs are constants. Those of later packs are the reference's
        until they are computed: the pairs of this one do not depend on them.
        """
        embedded = Embedded(self.model, pack.ids)
        scores = score_pack(
            self.model, pack, embedded=embedded.output, is_half=self.args.bf16, wants_top=True
        )
        log_probs = outputs.log_probs.index_put(at, scores.logps)
        loss = self._loss_unlogged(
            inputs,
            _Outputs(log_probs, outputs.entropy, outputs.is_top1, outputs.mean_logits),
        )
        self.accelerator.backward(loss / self.current_gradient_accumulation_steps)
        embedded.finish()
        outputs.put(at, scores)

    def _loss(self, inputs: Batch, outputs: _Outputs) -> Any:
        """Return TRL's loss of a batch, given the outputs of the model; logs its metrics."""
        return cast(Any, super())._compute_loss(lambda **_: outputs, inputs, False)

    def _loss_unlogged(self, inputs: Batch, outputs: _Outputs) -> Any:
        metrics, tokens = self._metrics, self._total_train_tokens
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        try:
            return self._loss(inputs, outputs)
        finally:
            self._metrics, self._total_train_tokens = metrics, tokens


def pairs_of(batch: Mapping[str, Tensor]) -> list[tuple[Sample, Sample]]:
    """Read the pairs of TRL's padded batch: B chosen sequences, then B rejected ones.

    The first token of a sequence is never predicted: it counts as a prompt if there is none.
    """
    lengths = batch["attention_mask"].sum(1)
    begins = (lengths - batch["completion_mask"].sum(1)).clamp(min=1).tolist()
    samples = [
        Sample(row, tuple(ids[:begin]), tuple(ids[begin:length]))
        for row, (ids, begin, length) in enumerate(
            zip(batch["input_ids"].tolist(), begins, lengths.tolist(), strict=True)
        )
    ]
    half = len(samples) // 2
    return list(zip(samples[:half], samples[half:], strict=True))
