"""Samples completions of the policy, with its current weights. Imports torch and transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from peft.tuners.tuners_utils import BaseTunerLayer
from transformers import GenerationConfig
from transformers.generation import logits_process

from ..compute import hugepages
from ..compute.frozen_int8 import FrozenInt8Linear
from ..compute.levels import NATIVE, levels
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
from ..engine.dialogues import Dialogues
from ..engine.fallback import FallbackRunner
from ..engine.layers import text_model
from ..engine.low_rank import Adapter, base_layer
from ..engine.padded import PaddedRunner
from ..engine.rollouts import UNLIMITED, Drawing, Segment, generate
from ..engine.sampling import BatchSampler, NotFiniteError
from ..errors import JobFailed
from ..models.generation_settings import clear_unapplied, end_tokens
from ..sequences.attention import can_pack
from ..training.finite import weight_norm

PACKING_PAYS = 16  # minimum tokens to generate for which packing the weights pays
FEW_ROWS = 4  # sequences up to which unpacked int8 weights are nearly as fast as packed ones
# Minimum tokens to generate for which packing int8 weights pays for few sequences: a decode step
# of 2 sequences of a 0.5B model takes 43 ms unpacked and 38 ms packed; packing takes 1.7 s, which
# is 340 steps.
PACKING_INT8_PAYS = 320


class Sampler:
    """Samples completions by the options of a GRPOConfig.

    The engine's decoder computes the logits of a model that can be packed, else its own forward
    pass. `rollout_dtype`: the precision of the weights in training, "float32" or, with packs on a
    CPU, "int8"; evaluations use the model's own. `keeps_logps`: whether completions of the training
    have the log-probabilities of their tokens, as int8 ones always do.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: Any,
        *,
        rollout_dtype: str = "float32",
        keeps_logps: bool = False,
    ) -> None:
        self.rollout_dtype = rollout_dtype
        self.ends = end_tokens(model, tokenizer)
        self._model = model
        self._config = config
        self._pad_id = tokenizer.pad_token_id
        self._packs = can_pack(model)
        self._keeps_logps = keeps_logps
        self._frozen_decoders: dict[LinearFactory, Decoder] = {}  # at most one
        self._frozen_invariant: Decoder | None = None  # of a base model in int8
        self._stepping: tuple[list[int], Decoder] | None = None  # on a GPU; see _current_steps
        tuned = (module for module in model.modules() if isinstance(module, BaseTunerLayer))
        self._tuned: BaseTunerLayer | None = next(tuned, None)  # a layer with an adapter
        self._adapter: Adapter | None = None  # if there is one and the decoder generates
        if self._packs and self._tuned is not None:
            self._adapter = Adapter.live(text_model(model).layers)
        self._is_padded: bool | None = None  # see _own_batch; None: not known yet
        self._generation = GenerationConfig(
            max_new_tokens=config.max_completion_length,
            do_sample=True,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=sorted(self.ends),
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            min_p=config.min_p,
            repetition_penalty=config.repetition_penalty,
            cache_implementation=config.cache_implementation,
            disable_compile=True,
        )

    @property
    def is_int8(self) -> bool:
        """Whether completions are sampled with int8 weights now: in training only."""
        return self.rollout_dtype == "int8" and bool(self._model.training)

    def sample(
        self, prompts: Sequence[Sequence[int]], uniform: NDArray[np.float64], ranks: Ranks
    ) -> list[Segment]:
        """Return a completion of each prompt; see `engine.rollouts`. Raises NotFiniteError.

        With several `ranks`, each samples a part and returns all. A model that is not packed has no
        dropout meanwhile.
        """
        how = self._drawing(max(map(len, prompts)))
        # An evaluation runs on rank 0 alone.
        ranks = ranks if self._model.training else ONE_PROCESS
        own = run_of(len(prompts), ranks)
        adapter = self._adapter and self._adapter.joined()
        # The same linear layers on every rank.
        with self._runner(len(prompts)) as runner:
            found = []
            if own.start < own.stop:
                found = generate(runner, prompts[own], uniform[own], how, adapter=adapter)
        if ranks.size == 1:
            return found
        written: list[Any] = [[one.ids, one.entropies, one.logps] for one in found]
        return [Segment(*fields) for part in ranks.gather(written) for fields in part]

    @contextmanager
    def dialogues(
        self, tokenizer: Any, *, stop: tuple[str, ...], most_sequences: int
    ) -> Iterator[Dialogues]:
        """Yield the dialogues of a step, with the current weights: see `engine.dialogues`.

        What is in the batch does not change a token: episodes come and go.
        """
        adapter = self._adapter and self._adapter.joined(is_batch_invariant=True)
        with self._runner(None) as runner:
            yield Dialogues(
                *(runner, self._drawing(0), tokenizer),
                most_sequences=most_sequences,
                stop=stop,
                adapter=adapter,
            )

    def _drawing(self, longest: int) -> Drawing:
        """Return how tokens are drawn; `longest`: tokens of the longest prompt."""
        # Logits processors of the generation config of the model apply here as well.
        config, _ = self._model._prepare_generation_config(self._generation)
        clear_unapplied(config)
        listed = self._model._get_logits_processor(
            config, input_ids_seq_length=longest, device=self._model.device
        )
        temperature = self._config.temperature
        sampler = BatchSampler(
            temperature=temperature, top_k=self._config.top_k, top_p=self._config.top_p
        )
        processors, sampler = _split_processors(listed, sampler)
        return Drawing(
            sampler=sampler,
            temperature=temperature,
            max_new_tokens=self._config.max_completion_length,
            ends=self.ends,
            processors=processors,
            pad_id=self._pad_id,
            wants_logps=self.is_int8 or self._keeps_logps,
        )

    @contextmanager
    def _runner(self, rows: int | None) -> Iterator[Any]:
        """Yield what computes the logits of `rows` sequences with the current weights.

        None: of sequences that come and go; what is in the batch does not change their tokens.
        """
        if self._packs:
            yield self._batch_invariant() if rows is None else self._decoder(rows)
            return
        was_training = self._model.training
        self._model.eval()
        try:
            yield self._own_pass if rows is None else self._own_batch()
        finally:
            self._model.train(was_training)

    def _own_batch(self) -> PaddedRunner | FallbackRunner:
        """Return the runner of a batch by the model's own forward pass."""
        if self._is_padded is None:
            self._is_padded = PaddedRunner(self._model, self._pad_id).is_exact()
        if self._is_padded:
            return PaddedRunner(self._model, self._pad_id)  # its KV cache ends with the completions
        return self._own_pass

    @cached_property
    def _own_pass(self) -> FallbackRunner:
        """The model's own forward pass, one sequence after another."""
        return FallbackRunner(self._model)

    def _decoder(self, rows: int) -> Decoder:
        """Return a decoder of the current weights for `rows` sequences.

        Every step has new weights. Those below an adapter are frozen, so their decoder is kept, and
        more time is spent on it: its weights are packed as tightly as possible, in huge pages. On a
        GPU the decoder is kept for its CUDA graphs, and the weights are copied to where they read.
        """
        make = self.linear_factory(rows)
        if self._adapter is None:
            if make is CastLinear:  # on a GPU
                return self._current_steps()
            return Decoder(self._model, make=make, use_cuda_steps=False)
        make_head = make
        if make is packed_float32:
            # The packed copy of the vocabulary's layer is the largest and saves the least time.
            make, make_head = compact_float32, compact_or_unpacked
        if self._has_int8_base:
            make = int8_linear
        if make not in self._frozen_decoders:
            decoder = Decoder(self._model, make=make, make_head=make_head, use_cuda_steps=False)
            hugepages.move_all(packed_areas(decoder.linears))
            self._frozen_decoders = {make: decoder}
        return self._frozen_decoders[make]

    def _batch_invariant(self) -> Decoder:
        """Return a decoder of the current weights, whose tokens do not depend on the batch."""
        if self.is_int8:
            return Decoder(self._model, precision="int8", use_cuda_steps=False)
        if not self._has_int8_base:
            return Decoder(self._model, use_cuda_steps=False)
        if self._frozen_invariant is None:
            self._frozen_invariant = Decoder(
                self._model, precision="int8", head_precision=NATIVE, use_cuda_steps=False
            )
        return self._frozen_invariant

    def _current_steps(self) -> Decoder:
        """Return the decoder of steps of fixed shapes, with the current weights.

        A new one where weights have moved, as at the first update of a policy that shared them with
        its reference. Its KV buffer has no limit: free memory must not decide which kernels compute
        a completion.
        """
        places = [weight.data_ptr() for weight in self._model.parameters()]
        if self._stepping is not None and self._stepping[0] == places:
            self._stepping[1].refresh()
        else:
            decoder = Decoder(
                self._model, make=CastLinear, use_cuda_steps=True, slot_bytes=UNLIMITED
            )
            self._stepping = places, decoder
        return self._stepping[1]

    @property
    def _has_int8_base(self) -> bool:
        """Whether the loss computes with int8 weights below the adapter."""
        return self._tuned is not None and isinstance(base_layer(self._tuned), FrozenInt8Linear)

    def linear_factory(self, rows: int) -> LinearFactory:
        """Return the linear-layer implementation for generation of `rows` sequences."""
        most_tokens = self._config.max_completion_length
        if self.is_int8:
            pays = rows > FEW_ROWS or most_tokens >= PACKING_INT8_PAYS
            return int8_linear if pays or levels().int8 == "warmd" else WeightOnlyInt8Linear
        if self._config.bf16:
            return CastLinear
        weight = self._model.get_input_embeddings().weight
        is_packable = has_onednn(weight) and weight.dtype == torch.float32
        return packed_float32 if is_packable and most_tokens >= PACKING_PAYS else InPlaceLinear


def _split_processors(
    processors: Sequence[Any], sampler: BatchSampler
) -> tuple[list[Any], BatchSampler]:
    """Split the logits processors of transformers from temperature, top-k and top-p.

    The sampler applies those three faster, unless another processor follows one of them.
    """
    known = (
        logits_process.TemperatureLogitsWarper,
        logits_process.TopKLogitsWarper,
        logits_process.TopPLogitsWarper,
    )
    is_known = [isinstance(process, known) for process in processors]
    if is_known != sorted(is_known):
        return list(processors), BatchSampler()
    return [p for p, does in zip(processors, is_known, strict=True) if not does], sampler


@contextmanager
def finite_probabilities(model: Any, step: int) -> Iterator[None]:
    """Sample tokens in this block, after `step` steps. Raises JobFailed for NaN or Inf."""
    try:
        yield
    except NotFiniteError as error:
        weight_norm(model, step)  # raises if the weights are the cause
        raise JobFailed(
            f"step {step + 1}: the model's probabilities are nan or infinite"
        ) from error


def run_of(count: int, ranks: Ranks) -> slice:
    """Return a rank's contiguous part of `count` items; parts are nearly equal, in rank order."""
    return slice(count * ranks.rank // ranks.size, count * (ranks.rank + 1) // ranks.size)
