"""LoRA adapters in the decoder: low-rank updates, added to its linear layers and never merged.

y = W x + (alpha / r) B A x (Hu et al. 2021, arXiv:2106.09685). The model's own layers are not
changed, so sequences of different adapters share its GEMMs in one batch, and a training packs its
frozen weights only once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from ..compute import native, onednn
from ..compute.batch_invariance import Rows, probe_rows

# The linear layers of a decoder layer that are computed as one.
FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
_JOINED = "joined"  # part of a update that covers a whole fused layer
_FEW = 16  # tokens up to which joined updates are computed by native code
_numbers = count(1)


@dataclass(frozen=True)
class LowRank:
    """The low-rank update of one layer, scale * B A: A (r, in), B (out, r)."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float
    part: str  # of FUSED
    outputs: slice  # of the fused layer
    native: Any = None  # native.low_rank.LowRankUpdates with the same weights, if it is used

    @property
    def is_joined(self) -> bool:
        """Whether it is several updates in one, see `Adapter.joined`."""
        return self.part == _JOINED


class Adapter:
    """The low-rank updates of one adapter, by layer number and name of the fused layer."""

    def __init__(
        self, layers: Sequence[Mapping[str, Sequence[LowRank]]], *, is_batch_invariant: bool
    ) -> None:
        """`is_batch_invariant`: whether a token gets the same bits whatever else is in the batch.

        This needs padded rows.
        """
        self.layers = layers
        self.is_batch_invariant = is_batch_invariant
        self.number = next(_numbers)  # distinct in this process and its forks

    @classmethod
    def live(cls, layers: Sequence[Any]) -> Adapter:
        """Return the adapter in the decoder layers of a PeftModel that is trained.

        It shares the weights of the model, and so has all later updates.
        """
        return cls([_updates(layer) for layer in layers], is_batch_invariant=False)

    def joined(self, *, is_batch_invariant: bool = False) -> Adapter:
        """Return a copy of the weights as they are now, with one update per fused layer.

        Two small GEMMs instead of up to six, and the scale in B: for a generation during which the
        weights do not change.
        """
        found = [
            {
                name: [_joined(updates, is_batch_invariant=is_batch_invariant)] if updates else []
                for name, updates in layer.items()
            }
            for layer in self.layers
        ]
        return Adapter(found, is_batch_invariant=is_batch_invariant)

    @classmethod
    def served(cls, layers: Sequence[Any]) -> Adapter:
        """Return the adapter in the decoder layers of a PeftModel, to serve.

        It computes in float32 for any dtype of its file; float32 weights are not copied.
        """
        found = [
            {
                name: [replace(p, a=p.a.float(), b=p.b.float()) for p in updates]
                for name, updates in _updates(layer).items()
            }
            for layer in layers
        ]
        return cls(found, is_batch_invariant=True)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All weights of the adapter."""
        updates = (p for layer in self.layers for of_fused in layer.values() for p in of_fused)
        return [tensor for update in updates for tensor in (update.a, update.b)]

    @property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.tensors)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


class Adapted(NamedTuple):
    """The tokens of a batch that an adapter applies to: all, or their indices (int64)."""

    adapter: Adapter
    rows: slice | torch.Tensor = slice(None)


def add_updates(
    adapted: Sequence[Adapted], layer: int, name: str, x: torch.Tensor, y: torch.Tensor
) -> None:
    """Add each adapter's update to y (tokens, out), the result of a fused layer for x."""
    for adapter, rows in adapted:
        updates = adapter.layers[layer][name]
        if not updates:
            continue
        own = x[rows].to(updates[0].a.dtype)
        if isinstance(rows, slice) and updates[0].is_joined and y.dtype == own.dtype:
            if updates[0].native is not None and len(own) <= _FEW:
                updates[0].native.add_to(y, own.contiguous())
            else:
                y[:, updates[0].outputs].addmm_(own @ updates[0].a.t(), updates[0].b.t())
            continue
        for update in updates:
            h = _linear(own, update.a, adapter.is_batch_invariant)
            h = _linear(h, update.b, adapter.is_batch_invariant).mul_(update.scale)
            y[rows, update.outputs] += h.to(y.dtype)


def among(adapted: Sequence[Adapted], tokens: torch.Tensor) -> list[Adapted]:
    """Return the adapters of some tokens (indices, int64), by their places among these."""
    return [
        Adapted(
            adapter,
            rows if isinstance(rows, slice) else torch.isin(tokens, rows).nonzero()[:, 0],
        )
        for adapter, rows in adapted
    ]


def unserved(wrapped: Any, layers: Sequence[Any]) -> str | None:
    """Return the name of an adapted part of a PeftModel that an Adapter would not cover."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    places = [part for parts in FUSED.values() for part in parts]
    served = {id(layer.get_submodule(part)) for layer in layers for part in places}
    for name, module in wrapped.named_modules():
        if isinstance(module, BaseTunerLayer) and id(module) not in served:
            return str(name).rpartition(".")[2]
    return None


def base_layer(layer: Any) -> Any:
    """Return the layer of the model in a LoRA layer of PEFT; any other layer as it is."""
    return getattr(layer, "base_layer", layer)


def _linear(x: torch.Tensor, weight: torch.Tensor, is_batch_invariant: bool) -> torch.Tensor:
    # On a GPU the model's own layers are not batch-invariant either (docs/gpu.md).
    if not is_batch_invariant or x.device.type != "cpu":
        return functional.linear(x, weight)
    multiply, rows = _batch_invariant(*weight.shape, torch.get_num_threads())
    return rows.compute(lambda part: multiply(part, weight), x, lambda _: 1)


_Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # (x, weight)


@cache
def _batch_invariant(outputs: int, inputs: int, threads: int) -> tuple[_Multiply, Rows]:
    """Return a float32 GEMM for a weight of this shape, and the rows that make it batch-invariant.

    torch's GEMM (MKL on x86) has the least overhead for such small weights, but for some shapes no
    numbers of rows make it batch-invariant. Then oneDNN's GEMM is used, and if there are none for
    that either, one row at a time.
    """
    probe = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(0))
    for multiply in (functional.linear, _onednn) if onednn.is_available() else (functional.linear,):
        form = partial(multiply, weight=probe)
        if (found := probe_rows([form], like=probe)) is not None:
            return multiply, found[0]
    return functional.linear, Rows(multiple=1, most=1)


def _onednn(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return onednn.linear(x, weight, None)


def _joined(updates: Sequence[LowRank], *, is_batch_invariant: bool) -> LowRank:
    """Return the updates of a fused layer as one: A stacked, B block-diagonal with the scales."""
    begin, end = updates[0].outputs.start, updates[-1].outputs.stop
    ranks = [len(update.a) for update in updates]
    b = updates[0].b.new_zeros(end - begin, sum(ranks))
    column = 0
    for update, rank in zip(updates, ranks, strict=True):
        rows = slice(update.outputs.start - begin, update.outputs.stop - begin)
        b[rows, column : column + rank] = update.b * update.scale
        column += rank
    a = torch.cat([update.a for update in updates])
    packed = None if is_batch_invariant else _native(updates)
    return LowRank(a, b, 1.0, _JOINED, slice(begin, end), packed)


def _native(updates: Sequence[LowRank]) -> Any:
    """Return the updates of a fused layer in native code; None where that is not supported."""
    if not native.is_available():
        return None
    from ..compute.native.low_rank import LowRankUpdates, Part

    if not LowRankUpdates.supports(updates[0].a):
        return None
    return LowRankUpdates(
        [Part(update.a, update.b * update.scale, update.outputs.start) for update in updates]
    )


def _updates(layer: Any) -> dict[str, list[LowRank]]:
    """Return the low-rank updates in a decoder layer of a PeftModel, by fused layer."""
    return {name: _of_fused(layer, parts) for name, parts in FUSED.items()}


def _of_fused(layer: Any, parts: Sequence[str]) -> list[LowRank]:
    found, begin = [], 0
    for part in parts:
        linear = layer.get_submodule(part)
        end = begin + base_layer(linear).out_features
        for name in getattr(linear, "lora_A", ()):
            a, b = (weights[name].weight.detach() for weights in (linear.lora_A, linear.lora_B))
            found.append(LowRank(a, b, linear.scaling[name], part, slice(begin, end)))
        begin = end
    return found
