"""Forward pass of Llama-like decoders over a ragged batch of sequences, without padding.

The tokens of all sequences are concatenated: one of each decoding sequence, or several to verify
drafts, many of each prompt in prefill. They share every linear layer; attention is computed per
sequence. Weights come from the transformers model, and a test compares the logits with its own.

On a GPU, decoding sequences are computed in steps of fixed shapes (`cuda_steps.py`), which are
batch-invariant to rounding only, not to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..compute import hugepages, native
from ..compute.allocator import release_freed_memory
from ..compute.frozen_int8 import FrozenInt8Linear
from ..compute.levels import NATIVE
from ..compute.linear_forms import HEAD_OF_INT4, Linear
from ..compute.linears import (
    LazilyPackedLinear,
    LinearBuilder,
    UniformBuilder,
    packed_areas,
    served_precision,
)
from ..compute.quantized import LinearFactory
from ..compute.shape import Shape
from .batch import adapted_rows, image_features, positions_of, wanted_rows
from .cuda_steps import CudaSteps
from .kv_cache import CHUNK, KVCache
from .layer_ops import LayerOps, TorchLayerOps
from .layers import Layer, layer_of, num_deep_layers, text_model
from .low_rank import Adapted, add_updates, among, base_layer
from .parts import Attend, Part
from .rope import Rope
from .span_attention import Attention

log = logging.getLogger(__name__)

# Model types with this structure: RMSNorm, RoPE, grouped-query attention (GQA), SwiGLU.
_MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # frequencies do not depend on the length

GPU_SPAN = 512  # prompt tokens that attend together on a GPU; on a CPU CHUNK, for equal bits
_PATIENCE = 4  # passes before the first layer is packed; then one layer per pass


class Decoder:
    """Computes logits for parts of many sequences in one pass."""

    chunk: int | None = CHUNK  # parts begin and end on this grid, except at a prompt's end
    forks = True  # sequences that begin with the same tokens may share their computation

    def __init__(
        self,
        model: Any,
        *,
        precision: str = NATIVE,
        make: LinearFactory | None = None,
        make_head: LinearFactory | None = None,
        head_precision: str | None = None,
        use_cuda_steps: bool | None = None,
        slot_bytes: int | None = None,
        spare_bytes: int | None = None,
        releases_sources: bool = False,
    ) -> None:
        """`make`: the implementation of all linear layers, instead of that for `precision`; not
        batch-invariant. `make_head`, `head_precision`: another implementation, or precision, of the
        vocabulary head.
        `use_cuda_steps`: whether to decode in steps of fixed shapes (default: on a GPU).
        `slot_bytes`: the most memory of their KV buffer (default: a share of what is free).
        `spare_bytes`: memory that packing must leave free (default: 1 GiB).
        `releases_sources`: whether the file pages of packed weights leave this process; only for
        weights that no thread writes to.
        """
        config = model.config.get_text_config()
        text = text_model(model)
        attention = text.layers[0].self_attn
        self.shape = Shape(
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=attention.head_dim,
            eps=config.rms_norm_eps,
            scale=attention.scaling,
        )
        self.embedding: torch.Tensor = text.embed_tokens.weight.detach()
        self.precision = served_precision(precision, self.embedding)
        self.uncached = None  # see FallbackRunner
        self._linears = (
            LinearBuilder(
                self.precision, spare_bytes=spare_bytes, releases_sources=releases_sources
            )
            if make is None
            else UniformBuilder(make)
        )
        self.layers = [
            layer_of(layer, self._linears, patience=_PATIENCE + number)
            for number, layer in enumerate(text.layers)
        ]
        self.norm = text.norm.weight.detach()
        self._heads: LinearBuilder | UniformBuilder = self._linears
        if make_head is not None:
            self._heads = UniformBuilder(make_head)
        elif head_precision is not None:
            precision = served_precision(head_precision, self.embedding)
            self._heads = LinearBuilder(precision, spare_bytes=spare_bytes)
        elif self.precision == "int4":  # an error in the head is one in every token
            self._heads = LinearBuilder(
                HEAD_OF_INT4, spare_bytes=spare_bytes, releases_sources=releases_sources
            )
        self.head = self._heads.fused(
            [model.get_output_embeddings()], patience=_PATIENCE + len(self.layers)
        )
        self.rope = Rope(text.rotary_emb, self.embedding)
        if use_cuda_steps is None:
            use_cuda_steps = self.embedding.device.type == "cuda"
        self._cuda_steps = CudaSteps(self, max_bytes=slot_bytes) if use_cuda_steps else None
        span = GPU_SPAN if use_cuda_steps else CHUNK  # prompt tokens that attend together
        self._attention = Attention(self.shape, span, like=self.embedding)
        norms = [norm for layer in self.layers for norm in layer.norms]
        natively = _native_layer_ops(self.shape, self.embedding, [self.norm, *norms])
        self._layer_ops: LayerOps = natively or TorchLayerOps(self.shape)
        self._fused_steps = None if natively is None else self._decode_steps()
        self._page_moves: Iterator[None] | None = None  # of packed weights into huge pages

    def _decode_steps(self) -> Any:
        from ..compute.fused import FusedDecodeSteps, FusedLayer
        from ..compute.native.openmp import openmp

        omp = openmp()
        assert omp is not None
        return FusedDecodeSteps(
            self.shape,
            [
                FusedLayer(layer.norms, (layer.qkv, layer.out, layer.gate_up, layer.down))
                for layer in self.layers
            ],
            self.norm,
            self.head,
            omp,
        )

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token gets the same bits whatever else is in the batch."""
        return self._linears.is_batch_invariant and self._heads.is_batch_invariant

    @property
    def verifies_drafts(self) -> bool:
        """Whether `Part.verifies` is supported: a pass over several tokens has a step's bits."""
        is_on_cpu = self.embedding.device.type == "cpu"
        return is_on_cpu and self._cuda_steps is None and self.is_batch_invariant

    def refresh(self) -> None:
        """Copy the current weights of the model to the linear layers, in the memory they have.

        Of a decoder with `make`, where that is CastLinear. All other weights are the model's own.
        """
        assert isinstance(self._linears, UniformBuilder)
        self._linears.refresh()

    @staticmethod
    def supports(model: Any) -> bool:
        """Whether a model has the structure that this class computes. Raises nothing."""
        config = model.config.get_text_config(decoder=True)
        if config.model_type not in _MODEL_TYPES or model.get_output_embeddings() is None:
            return False  # the names of its layers are not known
        layers = text_model(model).layers
        if type(base_layer(layers[0].self_attn.q_proj)) not in (torch.nn.Linear, FrozenInt8Linear):
            return False  # quantized by a library, for example
        if num_deep_layers(model) >= len(layers):
            return False  # features would be added to rows that the last layer drops
        window = getattr(config, "sliding_window", None)
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        rope = getattr(config, "rope_parameters", None) or {}
        return (
            config.hidden_act == "silu"
            and (window is None or not getattr(config, "use_sliding_window", True))
            and kinds == {"full_attention"}
            and rope.get("rope_type", "default") in _ROPE_TYPES
            and rope.get("partial_rotary_factor", 1.0) == 1.0
        )

    def num_bytes(self, capacity: int) -> int:
        """Return the bytes of a KV cache for that many positions."""
        size: int = self.embedding.element_size() * self.shape.head_dim
        return 2 * len(self.layers) * self.shape.kv_heads * capacity * size

    def new(self, capacity: int) -> KVCache:
        """Return an empty KV cache for at most that many positions."""
        return KVCache(
            layers=len(self.layers),
            heads=self.shape.kv_heads,
            size=self.shape.head_dim,
            capacity=capacity,
            like=self.embedding,
        )

    def fork(self, kv: KVCache, length: int, capacity: int) -> KVCache:
        """Return a KV cache with a copy of the first `length` positions of another."""
        if self._cuda_steps is not None:
            self._cuda_steps.release(kv)
        copy = self.new(capacity)
        copy.copy_prefix(kv, length)
        return copy

    def forward(self, parts: Sequence[Part]) -> torch.Tensor:
        """Compute the parts; return the wanted logits, in the order of the parts: (N, V)."""
        if self._cuda_steps is not None:
            return self._cuda_steps.forward(parts, self._forward)
        return self._forward(parts)

    def _forward(self, parts: Sequence[Part]) -> torch.Tensor:
        for part in parts:
            if part.kv.length + len(part.ids) > part.kv.capacity:  # native: unchecked
                raise IndexError(f"a sequence has room for {part.kv.capacity} positions")
        ids = [token for part in parts for token in part.ids]
        cos, sin = self.rope.at(positions_of(parts))
        x = self.embedding[torch.tensor(ids, device=self.embedding.device)]
        seen = image_features(parts)
        for where, features in seen:
            x[where] = features[0].to(x.dtype)
        deep = [(where, features[1:]) for where, features in seen if len(features) > 1]
        wanted = wanted_rows(parts)
        is_step = len(wanted) == len(ids) and not deep and all(map(_is_step, parts))
        adapted = adapted_rows(parts)
        steps = self._ready_fused_steps() if is_step and not adapted else None
        if steps is not None and steps.has_logits and len(ids) <= steps.max_tokens:
            logits: torch.Tensor = steps.logits(
                x,
                cos,
                sin,
                [part.kv.location for part in parts],
                [len(part.ids) for part in parts],
            )
        else:
            rows = torch.tensor(wanted, dtype=torch.long, device=x.device)
            x = self.hidden(
                x, cos, sin, self._attention.of(parts, self._layer_ops), rows, deep, adapted
            )
            logits = self.logits(x) if wanted else x[:, :0]
        for part in parts:
            part.kv.length += len(part.ids)
        return logits

    def idle_step(self) -> bool:
        """Pack a layer or move packed weights to huge pages; return whether there was work left."""
        for linear in self.linears:
            if isinstance(linear, LazilyPackedLinear) and linear.pack_now():
                return True
        self._ready_fused_steps()
        if self._page_moves is None:
            release_freed_memory()  # by packing; later it would split huge pages
            self._page_moves = hugepages.move(packed_areas(self.linears))
        for _ in self._page_moves:
            return True
        return False

    @property
    def linears(self) -> list[Linear]:
        """All linear layers, in order of computation."""
        of_layers = (
            linear
            for layer in self.layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        return [*of_layers, self.head]

    def _ready_fused_steps(self) -> Any:
        """Return compute.fused.FusedDecodeSteps, or None while they cannot be used."""
        if self._fused_steps is None:
            return None
        from ..compute.fused import LayoutMismatch

        try:
            return self._fused_steps if self._fused_steps.is_ready else None
        except LayoutMismatch as error:
            log.info("decode steps are not fused, which is slower: %s", error)
            self._fused_steps = None
            return None

    def hidden(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        deep: Sequence[tuple[slice, torch.Tensor]] = (),
        adapted: Sequence[Adapted] = (),
    ) -> torch.Tensor:
        """Compute all layers; return hidden states (tokens, hidden), or only those at `wanted`.

        x: (tokens, hidden); cos, sin: (tokens, 1, head_dim); wanted: int64. `deep`: image features
        added to tokens after the first layers, (layers, tokens, hidden) each (DeepStack,
        arXiv:2406.04334). `adapted`: the tokens with an adapter.
        """
        for number, layer in enumerate(self.layers):
            is_last = number == len(self.layers) - 1
            at_last = wanted if is_last else None
            x = self._compute(layer, number, x, cos, sin, attend, at_last, adapted)
            for where, features in deep:
                if number < len(features):
                    x[where] += features[number].to(x.dtype)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits (tokens, V) of hidden states (tokens, hidden) after the last layer."""
        return self._linear(self.head, self._layer_ops.rms_norm(x, self.norm))

    def _linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Apply a linear layer: (tokens, in) to (tokens, out)."""
        steps = self._ready_fused_steps()
        if steps is None:
            return linear(x)
        y: torch.Tensor = steps.linear(linear, x)
        return y

    def _compute(
        self,
        layer: Layer,
        number: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None,
        adapted: Sequence[Adapted],
    ) -> torch.Tensor:
        """Compute one layer; after its attention only the tokens `wanted`, unless None."""
        rowwise = self._layer_ops

        def apply(linear: Linear, name: str, x: torch.Tensor) -> torch.Tensor:
            y = self._linear(linear, x)
            add_updates(adapted, number, name, x, y)
            return y

        h = rowwise.rms_norm(x, layer.attention_norm)
        shape = self.shape
        qkv = apply(layer.qkv, "qkv", h).view(
            len(x), shape.heads + 2 * shape.kv_heads, shape.head_dim
        )
        rowwise.norm_and_rope(qkv, layer.head_norms, cos, sin)
        attended = attend(qkv, number)
        if wanted is not None:
            x, attended = x[wanted], attended[wanted]
            adapted = among(adapted, wanted)
            if not len(wanted):
                return x
        x = x + apply(layer.out, "out", attended.view(len(x), shape.heads * shape.head_dim))
        h = rowwise.rms_norm(x, layer.mlp_norm)
        h = rowwise.swiglu(apply(layer.gate_up, "gate_up", h))
        return x + apply(layer.down, "down", h)


def _is_step(part: Part) -> bool:
    """Whether all tokens of a part are computed like decode steps."""
    return part.verifies or len(part.ids) == 1


def _native_layer_ops(
    shape: Shape, embedding: torch.Tensor, norms: Sequence[torch.Tensor]
) -> LayerOps | None:
    """Return native layer operations, or None if they are not supported.

    embedding: (V, hidden); norms: all RMSNorm weights of the decoder.
    """
    if embedding.device.type != "cpu" or not native.is_available():
        return None
    from .native_layer_ops import NativeLayerOps

    return NativeLayerOps(shape) if NativeLayerOps.supports(shape, embedding, norms) else None
