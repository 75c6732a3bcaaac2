"""TRL's GRPOTrainer with sequence packing: the same losses and gradients with less computation.

- Generation by `rollout.generate`: one prefill per prompt; sequences leave the batch when they end.
- Log-probabilities from packs (`jobs.packing`): no padding, every prompt once per group, the
  vocabulary head at completion tokens only.
- All micro-batches of a step run together, so that a group split between them shares its prompt;
  each has its own loss, as in TRL.
- Completions with advantage 0 have no gradient; without a KL term they are not computed.
- With num_iterations > 1, the old log-probabilities are those of the first iteration.
- Optional int8 generation, corrected by truncated importance sampling in the loss.
- With bf16 on a GPU, matrix multiplications are in bfloat16; weights and sums stay in float32.

Models that `can_pack` rejects are trained by TRL's own code. Imports trl.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, cast

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from ..compute import hugepages
from ..compute.frozen_int8 import FrozenInt8Linear
from ..compute.levels import levels
from ..compute.linear_forms import (
    InPlaceLinear,
    compact_float32,
    compact_or_unpacked,
    has_onednn,
    int8_linear,
    packed_float32,
)
from ..compute.linears import packed_areas
from ..compute.quantized import CastLinear, LinearFactory, WeightOnlyInt8Linear
from ..context import ONE_PROCESS, Ranks
from ..engine.decoder import Decoder
from ..engine.layers import text_model
from ..engine.low_rank import Adapted, Adapter, base_layer
from ..engine.sampling import BatchSampler
from ..models.generation_settings import clear_unpacked
from ..packing.attention import can_pack, packed_attention
from ..packing.passes import Embedded, exchange, score_pack, tokens_that_fit
from ..packing.shared_prompts import Pack, Sample, split
from ..training.reference import CopyBeforeUpdate, copy_shared_weights
from .rollout import Completion, generate, split_processors
from .scoring import samples_of

Batch = dict[str, Any]

DRIFT = "sampling/sampling_logp_difference/mean"  # TRL's name; in nats
PACKING_PAYS = 16  # minimum tokens to generate for which packing the weights pays
FEW_ROWS = 4  # sequences up to which unpacked int8 weights are nearly as fast as packed ones
# Minimum tokens to generate for which packing int8 weights pays for few sequences: a decode step
# of 2 sequences of a 0.5B model takes 43 ms unpacked and 38 ms packed; packing takes 1.7 s, which
# is 340 steps.
PACKING_INT8_PAYS = 320


class PackedTrainer(GRPOTrainer):
    """A GRPOTrainer for text whose steps_per_generation is its gradient_accumulation_steps.

    `most_tokens` is the maximum size of a pack in tokens; None: no packing. `rollout_dtype` is the
    precision of generation in training, "float32" or (on a CPU, with packing) "int8".

    A batch may have replayed completions: `is_replayed` (B,) and, with log-probabilities of the
    policy that sampled them, `replayed_logps` (B, C).
    """

    model: Any
    ref_model: Any
    args: Any
    ranks: Ranks = ONE_PROCESS
    _buffered_inputs: Any  # a list of batches
    max_completion_length: Any
    _entropy_bonus_enabled: bool
    _entropy_window_stats: (
        Any  # a tensor or None: of the micro-batches of a step, for entropy_target
    )

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.generation_s = 0.0  # since it was reset to 0
        self.rollout_dtype = "float32"
        self.most_tokens: int | None = None
        if can_pack(self.model):
            self.most_tokens = tokens_that_fit(self.model, self.accelerator.device, self.ranks.size)
        self.keeps_logps = False  # whether completions are generated with their log-probabilities
        self.written: list[Completion] = []  # the latest completions
        self._scores_given: tuple[Tensor, Tensor] | None = (
            None  # (logps, entropies) for the current loss
        )
        self._losses: list[Tensor] = []  # of the micro-batches of the current step
        self._adapted: list[Adapted] = []  # the adapter, if one is trained and packs are used
        self._frozen_decoders: dict[LinearFactory, Decoder] = {}  # at most one
        tuned = (module for module in self.model.modules() if isinstance(module, BaseTunerLayer))
        self._tuned: BaseTunerLayer | None = next(tuned, None)  # a layer with an adapter
        if self.most_tokens is not None and self._tuned is not None:
            self._adapted = [Adapted(Adapter.live(text_model(self.model).layers))]

    def set_reference(self, model: Any | None, beta: float) -> None:
        """Set the reference model of the KL term, which has the weight `beta` in the loss.

        TRL would load one from disk. It may share its weights with the policy
        (`weight_sharing_clone`): they are separated before the first update.
        None: the policy has an adapter, and the model without it is the reference.
        """
        self.args.beta = self.beta = beta
        if model is None:
            return
        add_fused_lm_head(model, temperature=self.temperature)
        self.ref_model = self.accelerator.prepare_model(model, evaluation_mode=True)
        self.add_callback(CopyBeforeUpdate(self.model, self.ref_model))
        if self.args.sync_ref_model:
            self.add_callback(SyncRefModelCallback(self.ref_model, self.accelerator))

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.ref_model is not None:
            copy_shared_weights(self.model, self.ref_model)
        cast(Any, super())._load_from_checkpoint(*args, **kwargs)

    # Generation.

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            if self.most_tokens is None:
                ids, logps = cast(Any, super())._generate_single_turn(prompt_ids, *args, **kwargs)
                self.written = [Completion(list(row)) for row in ids]
                return ids, logps
            self.written = self._write(prompt_ids)
            return self._as_trl_returns(self.written)
        finally:
            self.generation_s += time.perf_counter() - started

    def _as_trl_returns(
        self, written: Sequence[Completion]
    ) -> tuple[list[list[int]], list[list[float]] | None]:
        """Return the tokens, and their log-probabilities where the loss corrects for int8."""
        logps = [completion.logps for completion in written] if self._generates_int8 else None
        return [completion.ids for completion in written], logps

    def _write(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        # Logits processors of the generation config of the model apply here as well.
        config, _ = self.model._prepare_generation_config(self.generation_config)
        clear_unpacked(config)
        listed = self.model._get_logits_processor(
            config, input_ids_seq_length=max(map(len, prompts)), device=self.model.device
        )
        sampler = BatchSampler(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)
        processors, sampler = split_processors(listed, sampler)
        return generate(
            self._decoder(len(prompts)),  # the same linear layers on every rank
            prompts,
            sampler=sampler,
            temperature=self.temperature,
            max_new_tokens=self.max_completion_length,
            end_ids=self.eos_token_ids,
            processors=processors,
            pad_id=self._tokenizer.pad_token_id,
            wants_logps=self._generates_int8 or self.keeps_logps,
            adapted=[Adapted(one.adapter.joined()) for one in self._adapted],
            # An evaluation runs on rank 0 alone.
            ranks=self.ranks if self.model.training else ONE_PROCESS,
        )

    def _decoder(self, rows: int) -> Decoder:
        """Return a decoder of the current weights for `rows` sequences.

        Every step has new weights. Those below an adapter are frozen, so their decoder is kept, and
        more time is spent on it: its weights are packed as tightly as possible, in huge pages.
        """
        make = self._linear_factory(rows)
        if not self._adapted:
            return Decoder(self.model, make=make, use_cuda_steps=False)
        make_head = make
        if make is packed_float32:
            # The packed copy of the vocabulary's layer is the largest and saves the least time.
            make, make_head = compact_float32, compact_or_unpacked
        if self._has_int8_base:
            make = int8_linear
        if make not in self._frozen_decoders:
            decoder = Decoder(self.model, make=make, make_head=make_head, use_cuda_steps=False)
            hugepages.move_all(packed_areas(decoder.linears))
            self._frozen_decoders = {make: decoder}
        return self._frozen_decoders[make]

    @property
    def _has_int8_base(self) -> bool:
        """Whether the loss computes with int8 weights below the adapter."""
        return self._tuned is not None and isinstance(base_layer(self._tuned), FrozenInt8Linear)

    def _linear_factory(self, rows: int) -> LinearFactory:
        """Return the linear-layer implementation for generation of `rows` sequences."""
        if self._generates_int8:
            pays = rows > FEW_ROWS or self.max_completion_length >= PACKING_INT8_PAYS
            return int8_linear if pays or levels().int8 == "warmd" else WeightOnlyInt8Linear
        if self.args.bf16:
            return CastLinear
        weight = self.model.get_input_embeddings().weight
        is_packable = has_onednn(weight) and weight.dtype == torch.float32
        pays = self.max_completion_length >= PACKING_PAYS
        return packed_float32 if is_packable and pays else InPlaceLinear

    @property
    def _generates_int8(self) -> bool:
        """Whether generation uses int8 weights: in training only, not in evaluation."""
        return self.rollout_dtype == "int8" and bool(self.model.training)

    @property
    def _is_adapter_off(self) -> bool:
        """Whether the model is the reference now: TRL turns the adapter off to score it."""
        return self._tuned is not None and self._tuned.disable_adapters

    @property
    def _needs_all_gradients(self) -> bool:
        """Whether completions with advantage 0 have a gradient: KL term, entropy bonus."""
        return bool(self.beta != 0 or self._entropy_bonus_enabled)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> Batch:
        batch: Batch = super()._generate_and_score_completions(inputs)
        if self.most_tokens is not None and not self._needs_all_gradients:
            entropies = torch.zeros(batch["completion_ids"].shape)
            for row, completion in enumerate(self.written):
                entropies[row, : len(completion.ids)] = torch.tensor(completion.entropies)
            batch["entropies"] = entropies.to(batch["completion_ids"].device)
        return batch

    # Scoring.

    def _get_per_token_logps_and_entropies(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        if self.most_tokens is None:
            return cast(Any, super())._get_per_token_logps_and_entropies(  # type: ignore[no-any-return]
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        if self._scores_given is not None:
            return (*self._scores_given, None)
        shape = (len(input_ids), logits_to_keep)
        if model is self.model and not self._is_adapter_off:
            # Old log-probabilities: the first iteration computes them (see `_learn`).
            return torch.zeros(shape, device=input_ids.device), None, None
        parts = {
            "prompt_ids": input_ids[:, :-logits_to_keep],
            "prompt_mask": attention_mask[:, :-logits_to_keep],
            "completion_ids": input_ids[:, -logits_to_keep:],
            "completion_mask": attention_mask[:, -logits_to_keep:],
        }
        logps = torch.zeros(shape, device=input_ids.device)
        entropies = torch.zeros_like(logps)
        with torch.random.fork_rng(devices=[], enabled=self.ranks.size > 1):  # of dropout
            self._score_into(logps, entropies, model, samples_of(parts))
        return logps, entropies, None

    @torch.no_grad()
    def _score_into(
        self, logps: Tensor, entropies: Tensor, model: Any, rows: Sequence[Sample]
    ) -> None:
        places = []
        with packed_attention(model):
            for part in split([(row,) for row in rows], cast(int, self.most_tokens), self.ranks):
                pack = Pack(part, model.device)
                at = (pack.rows, pack.columns)
                logps[at], entropies[at], _ = score_pack(
                    model, pack, self.temperature, is_half=self.args.bf16
                )
                places.append(at)
        exchange(places, (logps, entropies), self.ranks)

    # Training.

    def compute_loss(self, model: Any, inputs: Batch, *args: Any, **kwargs: Any) -> Any:
        if self.most_tokens is None or not model.training:
            return super().compute_loss(model, inputs, *args, **kwargs)
        at = self._step % self.args.steps_per_generation
        if at == 0:
            self._losses = self._learn(self._buffered_inputs, self.most_tokens)
        # A leaf for the backward() of the Trainer: the gradients are computed already.
        return self._losses[at].requires_grad_()

    def _learn(self, batches: list[Batch], most_tokens: int) -> list[Tensor]:
        """Accumulate the gradients of all micro-batches of a step; return their losses."""
        is_first = self._step % (self.args.steps_per_generation * self.num_iterations) == 0
        if is_first:
            batches = [_without_old_logps(batch) for batch in batches]
        joined = {
            name: torch.cat([b[name] for b in batches]) for name in _SCORED if name in batches[0]
        }
        rows = learning = samples_of(joined)
        # Completions that are in no pack keep their old log-probabilities (ratio 1).
        unknown = torch.zeros(joined["completion_ids"].shape, device=self.model.device)
        logps = joined.get("old_per_token_logps", unknown).clone()
        entropies = joined.get("entropies", unknown).clone()
        if not self._needs_all_gradients:
            learns = (joined["advantages"].ne(0) | joined.get("is_replayed", False)).tolist()
            learning = [row for row in rows if learns[row.index]]
        if self.top_entropy_quantile < 1:  # the entropies of all tokens decide which have a loss
            self._score_into(logps, entropies, self.model, rows)
        elif self.num_iterations > 1 and not self._needs_all_gradients:  # for the metrics only
            silent = [row for row in rows if not learns[row.index]]
            self._score_into(logps, entropies, self.model, silent)
        places = []
        with packed_attention(self.model):
            for part in split([(row,) for row in learning], most_tokens, self.ranks):
                pack = Pack(part, self.model.device)
                at = (pack.rows, pack.columns)
                embedded = Embedded(self.model, pack.ids)
                scores, nats, _ = score_pack(
                    self.model,
                    pack,
                    self.temperature,
                    embedded.output,
                    is_half=self.args.bf16,
                    has_entropy_gradient=self._entropy_bonus_enabled,
                )
                losses = self._losses_of(
                    batches, logps.index_put(at, scores), entropies.index_put(at, nats)
                )
                self.accelerator.backward(torch.stack(losses).sum())
                embedded.finish()
                logps[at], entropies[at] = scores.detach(), nats.detach()
                places.append(at)
        exchange(places, (logps, entropies), self.ranks)
        if not learning:  # AdamW treats a zero gradient differently from None
            for weight in self.model.parameters():
                if weight.requires_grad and weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        with torch.no_grad():  # with the scores of all packs, for logging and the NaN check
            losses = self._losses_of(batches, logps, entropies, logged=True)
        if is_first and self.num_iterations > 1:
            for batch, old in zip(self._buffered_inputs, _split_like(batches, logps), strict=True):
                batch["old_per_token_logps"] = old
        return losses

    def _losses_of(
        self, batches: list[Batch], logps: Tensor, entropies: Tensor, *, logged: bool = False
    ) -> list[Tensor]:
        """Return TRL's loss of each micro-batch; logps, entropies: (B, C) float32 of all."""
        metrics, window = self._metrics, self._entropy_window_stats
        is_last_micro_batch = self.accelerator.sync_gradients
        if not logged:
            self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        try:
            losses = []
            for number, (batch, *given) in enumerate(
                zip(
                    batches,
                    _split_like(batches, logps),
                    _split_like(batches, entropies),
                    strict=True,
                ),
                start=1,
            ):
                self._scores_given = (given[0], given[1])
                # TRL updates the coefficient of the entropy bonus with the last micro-batch.
                self.accelerator.sync_gradients = logged and number == len(batches)
                if "is_replayed" in batch:
                    batch = _with_behavior(batch, given[0].detach())
                if "sampling_per_token_logps" in batch:
                    batch = self._corrected(batch, given[0].detach())
                losses.append(cast(Any, super())._compute_loss(self.model, batch))
            return losses
        finally:
            self._scores_given, self._metrics = None, metrics
            self.accelerator.sync_gradients = is_last_micro_batch
            if not logged:
                self._entropy_window_stats = window

    def _corrected(self, batch: Batch, logps: Tensor) -> Batch:
        """Apply truncated importance sampling, as TRL does for vLLM ("token_truncate").

        Each token is weighted by p_model / p_int8, clipped. The losses are linear in the
        advantages, so the weights are multiplied into them: (B, C). logps: (B, C) float32, of the
        model, used as old log-probabilities in the first iteration.
        """
        old = batch.get("old_per_token_logps", logps)
        mask = batch["completion_mask"].bool()
        drift = (old - batch["sampling_per_token_logps"]).masked_fill(~mask, 0.0)
        ratio = drift.exp().clamp(max=self.args.vllm_importance_sampling_clip_max)
        if not self._needs_all_gradients:  # the others have no log-probabilities of the model
            mask &= batch["advantages"].ne(0)[:, None]
        mean = drift[mask].abs().mean() if bool(mask.any()) else 0.0
        self._metrics["train"][DRIFT].append(float(mean))
        return {**batch, "advantages": batch["advantages"][:, None] * ratio}


_SCORED = (
    "prompt_ids",
    "prompt_mask",
    "completion_ids",
    "completion_mask",
    "advantages",
    "old_per_token_logps",
    "entropies",
    "is_replayed",
)


def _without_old_logps(batch: Batch) -> Batch:
    return {name: value for name, value in batch.items() if name != "old_per_token_logps"}


def _with_behavior(batch: Batch, logps: Tensor) -> Batch:
    """Set the old log-probabilities of replayed completions: of the policy that sampled them."""
    old = batch.get("old_per_token_logps", logps)
    replayed = batch["is_replayed"][:, None]
    return {**batch, "old_per_token_logps": torch.where(replayed, batch["replayed_logps"], old)}


def _split_like(batches: Sequence[Batch], values: Tensor) -> Sequence[Tensor]:
    """Split (B, C) of a whole step into its micro-batches."""
    return torch.split(values, [len(batch["completion_ids"]) for batch in batches])
