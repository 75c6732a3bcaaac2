"""The forward pass of Llama-like models over a batch of sequences, without padding.

Rows are positions: of many sequences side by side, one of each that writes and many of each whose
prompt is read. All rows share every linear layer; attention is computed for each sequence by
itself. Weights come from the transformers model; a test compares the logits with its own.

On a GPU, sequences that write are computed in steps of fixed shapes (`cuda_steps.py`): rows are the same
to rounding there, not to the bit.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from ..compute import hugepages, native
from ..compute.levels import NATIVE
from ..compute.linears import (
    LazilyPackedLinear,
    Linear,
    Linears,
    Uniform,
    packed_areas,
    served_precision,
)
from ..compute.quantized import LinearFactory
from ..compute.shape import Shape
from .cuda_steps import FixedSteps
from .kv_cache import CHUNK, KeyValues
from .layer_ops import Norms, Rowwise, Single, Torch
from .parts import Attend, Part
from .rope import Rope

log = logging.getLogger(__name__)

# Model types with this structure: RMSNorm, rotary positions, grouped heads, SwiGLU.
_MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "qwen3"),
    *("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"),
)
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # whose frequencies depend on no length

_MOST_SEQUENCES = 64  # of a fused decode step
_PATIENCE = 4  # turns before the first layer is packed; after that one layer a turn


@dataclass(frozen=True)
class _Span:
    """Rows of one sequence within one chunk of the grid, more than one."""

    kv: KeyValues
    row: int
    begin: int  # position of the first row
    end: int
    mask: torch.Tensor  # (groups * rows, end)


@dataclass(frozen=True)
class Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    head_norms: Norms | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def norms(self) -> tuple[torch.Tensor, ...]:
        """Before attention and the MLP, and of queries and keys, if there are such."""
        return self.attention_norm, self.mlp_norm, *(self.head_norms or ())


class Decoder:
    """Computes logits for the parts of many sequences at once."""

    chunk: int | None = CHUNK  # a part must not begin or end within one, but for a prompt's end

    def __init__(
        self,
        model: Any,
        *,
        precision: str = NATIVE,
        make: LinearFactory | None = None,
        is_fixed: bool | None = None,
        spare_bytes: int | None = None,
    ) -> None:
        """`make`: the form of all linear layers, in the place of those that suit `precision`.

        Rows may depend on each other then. `is_fixed`: whether to write in steps of fixed shapes;
        by default on a GPU. `spare_bytes`: of memory that packing leaves free.
        """
        config = model.config.get_text_config()
        text = _text_model(model)
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
        self._linears = (
            Linears(self.precision, spare_bytes=spare_bytes) if make is None else Uniform(make)
        )
        self.layers = [
            _layer(layer, self._linears, patience=_PATIENCE + number)
            for number, layer in enumerate(text.layers)
        ]
        self.norm = text.norm.weight.detach()
        self.head = self._linears.fused(
            [model.get_output_embeddings()], patience=_PATIENCE + len(self.layers)
        )
        self.rope = Rope(text.rotary_emb, self.embedding)
        if is_fixed is None:
            is_fixed = self.embedding.device.type == "cuda"
        self._fixed = FixedSteps(self) if is_fixed else None
        norms = [norm for layer in self.layers for norm in layer.norms]
        natively = _native_rowwise(self.shape, self.embedding, [self.norm, *norms])
        self._rowwise: Rowwise = natively or Torch(self.shape)
        self._steps = None if natively is None else self._decode_steps()
        self._moving: Iterator[None] | None = None  # packed weights, into huge pages

    def _decode_steps(self) -> Any:
        from ..compute.native.fused import DecodeSteps, FusedLayer
        from ..compute.native.openmp import openmp

        team = openmp()
        assert team is not None
        return DecodeSteps(
            self.shape,
            [
                FusedLayer(layer.norms, (layer.qkv, layer.out, layer.gate_up, layer.down))
                for layer in self.layers
            ],
            self.norm,
            self.head,
            team,
        )

    @property
    def is_exact(self) -> bool:
        """Whether rows do not depend on each other."""
        return self._linears.is_exact

    @staticmethod
    def takes(model: Any) -> bool:
        """Whether this is a model of the right structure. Raises for none."""
        config = model.config.get_text_config(decoder=True)
        if config.model_type not in _MODEL_TYPES or model.get_output_embeddings() is None:
            return False  # what its layers are called is not known
        layers = _text_model(model).layers
        if type(layers[0].self_attn.q_proj) is not torch.nn.Linear:
            return False  # an adapter, perhaps
        if _num_deep(model) >= len(layers):
            return False  # the last layer computes some rows alone
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
        """The memory of a sequence of that many positions."""
        size: int = self.embedding.element_size() * self.shape.head_dim
        return 2 * len(self.layers) * self.shape.kv_heads * capacity * size

    def new(self, capacity: int) -> KeyValues:
        """Return room for a sequence of at most so many positions."""
        return KeyValues(
            layers=len(self.layers),
            heads=self.shape.kv_heads,
            size=self.shape.head_dim,
            capacity=capacity,
            like=self.embedding,
        )

    def fork(self, kv: KeyValues, length: int, capacity: int) -> KeyValues:
        """Return a sequence that begins with the first `length` positions of another."""
        if self._fixed is not None:
            self._fixed.release(kv)
        copy = self.new(capacity)
        copy.fill_from(kv, length)
        return copy

    def forward(self, parts: Sequence[Part]) -> torch.Tensor:
        """Compute the parts; return the logits after each that wants them: (wanting, V)."""
        if self._fixed is not None:
            return self._fixed.forward(parts, self._forward)
        return self._forward(parts)

    def _forward(self, parts: Sequence[Part]) -> torch.Tensor:
        for part in parts:
            if part.kv.length + len(part.ids) > part.kv.capacity:  # machine code would not see it
                raise IndexError(f"a sequence has room for {part.kv.capacity} positions")
        ids = [token for part in parts for token in part.ids]
        cos, sin = self.rope.at(_places(parts))
        x = self.embedding[torch.tensor(ids, device=self.embedding.device)]
        seen = _seen(parts)
        for where, features in seen:
            x[where] = features[0].to(x.dtype)
        deep = [(where, features[1:]) for where, features in seen if len(features) > 1]
        wanted = _wanted(parts)
        is_step = len(wanted) == len(ids) <= _MOST_SEQUENCES and not deep
        steps = self._ready_steps() if is_step else None
        if steps is not None:
            logits: torch.Tensor = steps.logits(x, cos, sin, [part.kv.place for part in parts])
        else:
            rows = torch.tensor(wanted, dtype=torch.long, device=x.device)
            x = self.hidden(x, cos, sin, self._attention(parts), rows, deep)
            logits = self.logits(x) if wanted else x[:, :0]
        for part in parts:
            part.kv.length += len(part.ids)
        return logits

    def settle(self) -> bool:
        """Do a part of what makes later passes faster; return whether there was something to do."""
        for linear in self.linears:
            if isinstance(linear, LazilyPackedLinear) and linear.settle():
                return True
        self._ready_steps()
        if self._moving is None:
            self._moving = hugepages.move(packed_areas(self.linears))
        for _ in self._moving:
            return True
        return False

    @property
    def linears(self) -> list[Linear]:
        """All linear layers, in their order."""
        of_layers = (
            linear
            for layer in self.layers
            for linear in (layer.qkv, layer.out, layer.gate_up, layer.down)
        )
        return [*of_layers, self.head]

    def _ready_steps(self) -> Any:
        """The fused decode steps (native.fused.DecodeSteps), or None while they cannot be used."""
        if self._steps is None:
            return None
        from ..compute.native.fused import NotPackedAlike

        try:
            return self._steps if self._steps.is_ready else None
        except NotPackedAlike as error:
            log.info("decode steps take PyTorch's operations: %s", error)
            self._steps = None
            return None

    def _attention(self, parts: Sequence[Part]) -> Attend:
        singles, spans = self._spans(parts)

        def attend(qkv: torch.Tensor, number: int) -> torch.Tensor:
            attended = torch.empty_like(qkv[:, : self.shape.heads])
            for span in spans:
                self._attend(qkv, attended, span, number)
            if singles:
                self._rowwise.attend(qkv, attended, singles, number)
            return attended

        return attend

    def hidden(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None = None,
        deep: Sequence[tuple[slice, torch.Tensor]] = (),
    ) -> torch.Tensor:
        """All layers; return the rows `wanted` (int64), or all, of what is behind them.

        x: (rows, hidden); cos, sin: (rows, 1, size). `deep`: what is added to rows behind the first
        layers, (layers, rows, hidden) each (DeepStack, arXiv:2406.04334).
        """
        for number, layer in enumerate(self.layers):
            is_last = number == len(self.layers) - 1
            x = self._compute(layer, number, x, cos, sin, attend, wanted if is_last else None)
            for where, features in deep:
                if number < len(features):
                    x[where] += features[number].to(x.dtype)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The logits of rows (rows, hidden) behind the last layer: (rows, V)."""
        return self._product(self.head, self._rowwise.normalise(x, self.norm))

    def _product(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """A layer's outputs (rows, outputs) of x (rows, inputs)."""
        steps = self._ready_steps()
        if steps is None:
            return linear(x)
        y: torch.Tensor = steps.product(linear, x)
        return y

    def _spans(self, parts: Sequence[Part]) -> tuple[list[Single], list[_Span]]:
        singles, spans, row = [], [], 0
        for part in parts:
            begin, last = part.kv.length, part.kv.length + len(part.ids)
            while begin < last:
                end = min(begin // CHUNK * CHUNK + CHUNK, last)
                if end - begin == 1:
                    singles.append(Single(row, part.kv, begin))
                else:
                    spans.append(_Span(part.kv, row, begin, end, self._mask(begin, end)))
                row += end - begin
                begin = end
        return singles, spans

    def _mask(self, begin: int, end: int) -> torch.Tensor:
        like = self.embedding
        mask = like.new_zeros(end - begin, end)
        columns = torch.arange(end, device=like.device)
        rows = torch.arange(begin, end, device=like.device)
        mask.masked_fill_(columns > rows[:, None], float("-inf"))
        return mask.repeat(self.shape.heads // self.shape.kv_heads, 1)

    def _compute(
        self,
        layer: Layer,
        number: int,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        attend: Attend,
        wanted: torch.Tensor | None,
    ) -> torch.Tensor:
        """One layer; of what comes behind its attention only the rows `wanted`, unless None."""
        rowwise = self._rowwise
        h = rowwise.normalise(x, layer.attention_norm)
        shape = self.shape
        qkv = self._product(layer.qkv, h).view(
            len(x), shape.heads + 2 * shape.kv_heads, shape.head_dim
        )
        rowwise.turn(qkv, layer.head_norms, cos, sin)
        attended = attend(qkv, number)
        if wanted is not None:
            x, attended = x[wanted], attended[wanted]
            if not len(wanted):
                return x
        x = x + self._product(layer.out, attended.view(len(x), shape.heads * shape.head_dim))
        h = rowwise.normalise(x, layer.mlp_norm)
        return x + self._product(layer.down, rowwise.gate(self._product(layer.gate_up, h)))

    def _attend(self, qkv: torch.Tensor, attended: torch.Tensor, span: _Span, number: int) -> None:
        """Attention of one span, its groups of heads folded into the rows of a query."""
        written, keys, values = span.kv.layers[number]
        begin, end = span.begin, span.end
        shape, heads, size = self.shape, self.shape.kv_heads, self.shape.head_dim
        groups = shape.heads // heads
        count = end - begin
        rows = qkv[span.row : span.row + count]
        new = rows[:, shape.heads :].view(count, 2, heads, size)
        written[:, :, begin:end] = new.permute(1, 2, 0, 3)
        query = rows[:, : shape.heads].view(count, heads, groups, size).permute(1, 2, 0, 3)
        result = functional.scaled_dot_product_attention(
            query.reshape(1, heads, groups * count, size),
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=span.mask,
            scale=shape.scale,
        ).view(heads, groups, count, size)
        target = attended[span.row : span.row + count].view(count, heads, groups, size)
        target.copy_(result.permute(2, 0, 1, 3))


def _wanted(parts: Sequence[Part]) -> list[int]:
    """The rows whose logits are asked for."""
    wanted, row = [], 0
    for part in parts:
        row += len(part.ids)
        if part.wants_logits:
            wanted.append(row - 1)
    return wanted


def _seen(parts: Sequence[Part]) -> list[tuple[slice, torch.Tensor]]:
    """The features of images among all rows, and which rows they belong to."""
    found, row = [], 0
    for part in parts:
        for first, features in part.seen:
            begin = row + first
            found.append((slice(begin, begin + features.shape[1]), features))
        row += len(part.ids)
    return found


def _num_deep(model: Any) -> int:
    """The number of layers behind which features of images are added (Qwen3-VL)."""
    vision = getattr(model.config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())


def _text_model(model: Any) -> Any:
    """The part of a model that reads text, where it has another one for images."""
    inner = getattr(model, "model", None)
    return getattr(inner, "language_model", inner)


def _places(parts: Sequence[Part]) -> torch.Tensor:
    """The positions of all rows: (rows,), or (3, rows) as soon as one part has such."""
    if all(part.places is None for part in parts):
        begins = [(part.kv.length + part.offset, len(part.ids)) for part in parts]
        line = [place for begin, count in begins for place in range(begin, begin + count)]
        return torch.tensor(line)
    columns = []
    for part in parts:
        begin = part.kv.length + part.offset
        line_of_part = torch.arange(begin, begin + len(part.ids)).expand(3, -1)
        columns.append(line_of_part if part.places is None else part.places)
    return torch.cat(columns, dim=1)


def _layer(layer: Any, linears: Linears | Uniform, *, patience: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp

    def fused(*layers: torch.nn.Linear) -> Linear:
        return linears.fused(layers, patience=patience)

    has_head_norms = hasattr(attention, "q_norm")
    return Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=fused(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=(attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
        if has_head_norms
        else None,
        out=fused(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=fused(mlp.gate_proj, mlp.up_proj),
        down=fused(mlp.down_proj),
    )


def _native_rowwise(
    shape: Shape, embedding: torch.Tensor, norms: Sequence[torch.Tensor]
) -> Rowwise | None:
    """Return the native operations, or None where they cannot be had.

    embedding: (V, hidden); norms: the weights of all of a decoder's.
    """
    if embedding.device.type != "cpu" or not native.is_available():
        return None
    from .native_layer_ops import Native

    return Native(shape) if Native.takes(shape, embedding, norms) else None
