"""The forms of a linear layer: libraries' and warmd's kernels, weights in place or packed.

`levels` selects the kernels; linears.py builds the layers of a model from these forms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from . import onednn
from .levels import MANY_ROWS, levels
from .quantized import Bfloat16Linear, CastLinear, Int8Linear, LinearFactory, LinearFn

_TRIED_ROWS = 4
_TRIED_OUTPUTS = 1024
_CHECKED_ROWS = 64  # of a weight, compared at once: other weights differ in the first

HEAD_OF_INT4 = "grouped-int8"  # the form of a head, which is no precision that can be requested

Linear = LinearFn  # x: (rows, in); y: (rows, out)


class PlainLinear:
    """PyTorch's linear layer, on one fused weight."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        self._weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)

    def share_weight(self, layers: Sequence[torch.nn.Linear | torch.nn.Embedding]) -> None:
        """Make the fused layers use the fused weight, so that there is no second copy."""
        if len(layers) > 1:
            parts = torch.split(self._weight, [len(layer.weight) for layer in layers])
            for layer, part in zip(layers, parts, strict=True):
                layer.weight.data = part


class InPlaceLinear:
    """PyTorch's linear layer on the model's weights, one GEMM each: no fused copy."""

    _multiply: Callable[..., torch.Tensor] = staticmethod(functional.linear)

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        self._weights = list(weights)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self._weights) == 1:
            return self._multiply(x, self._weights[0], self._bias)
        y = torch.cat([self._multiply(x, weight, None) for weight in self._weights], dim=1)
        return y if self._bias is None else y.add_(self._bias)


class UnpackedLinear(InPlaceLinear):
    """float32 on a CPU by oneDNN, on the model's weights."""

    _multiply = staticmethod(onednn.linear)


class PackedLinear:
    """float32 on a CPU by oneDNN, on a packed copy of the weights."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self.packed = onednn.pack(weight)
        self.bias = bias
        self.shape: tuple[int, int] = (len(weight), weight.shape[1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return onednn.linear(x, self.packed, self.bias)


class NativeFloat32Linear:
    """float32 on a CPU: warmd's kernels up to `max_rows` rows, oneDNN beyond; the same bits."""

    def __init__(
        self,
        panels: Any,
        weights: Sequence[torch.Tensor],
        bias: torch.Tensor | None,
        max_rows: int,
    ) -> None:
        """`panels`: a native.panels.PanelLinear of these weights."""
        self.panels = panels
        self.shape: tuple[int, int] = panels.shape
        self._max_rows = max_rows
        self._unpacked = UnpackedLinear(weights, bias) if max_rows < MANY_ROWS else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._unpacked is not None and len(x) > self._max_rows:
            return self._unpacked(x)
        y: torch.Tensor = self.panels(x)
        return y


def packed_float32(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a float32 layer on packed weights, with the kernel that `levels` selects."""
    if levels().float32 == "warmd":
        from .native import panels

        # If oneDNN packs in the order of warmd's kernels, both share one copy (compute.fused).
        if not panels.READS_ONEDNN_ORDER:
            k_block = _k_block_of(weights, bias)
            if k_block is not None:
                packed = panels.float32_linear(weights, bias, k_block=k_block)
                return NativeFloat32Linear(packed, weights, bias, levels().max_rows)
    return PackedLinear(weights, bias)


def compact_float32(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return `packed_float32`'s layer, in half of the memory where the weights allow it."""
    return _compact(weights, bias) or packed_float32(weights, bias)


def compact_or_unpacked(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a float32 layer packed in half of the memory, or else an unpacked one."""
    return _compact(weights, bias) or UnpackedLinear(weights, bias)


def _compact(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn | None:
    """Return a float32 layer that is packed in bfloat16; None where that is not exact.

    Weights that are bfloat16 numbers, as those of most published models, are widened when loaded:
    the same bits as `packed_float32`'s, and half of the weight traffic.
    """
    if levels().float32 != "warmd" or not all(map(_is_exact_in_bfloat16, weights)):
        return None
    k_block = _k_block_of(weights, bias)
    if k_block is None:
        return None
    from .native import panels

    packed = panels.bfloat16_linear(weights, bias, k_block=k_block)
    return NativeFloat32Linear(packed, weights, bias, levels().max_rows)


def _is_exact_in_bfloat16(weight: torch.Tensor) -> bool:
    """Whether every float32 number of a weight (out, in) is a bfloat16 number."""
    return all(
        torch.equal(part.bfloat16().float(), part) for part in torch.split(weight, _CHECKED_ROWS)
    )


_k_blocks: dict[tuple[Any, ...], int | None] = {}  # by the shapes of a layer


def _k_block_of(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> int | None:
    """Return the block of inputs (K) that oneDNN sums before it adds to the accumulated sum.

    Probed on the first outputs, once per shape; None if none of the known blocks gives its bits.
    """
    from .native import panels

    kind = (tuple(weight.shape for weight in weights), bias is None)
    if kind not in _k_blocks:
        some, first = [], _TRIED_OUTPUTS
        for weight in weights:
            some.append(weight[:first])
            first -= len(some[-1])
        x = torch.randn(
            _TRIED_ROWS, weights[0].shape[1], generator=torch.Generator().manual_seed(0)
        )
        whole = [
            onednn.linear(x, weight, None)[:, : len(part)]
            for weight, part in zip(weights, some, strict=True)
        ]
        found = panels.k_block_of(some, x, torch.cat(whole, dim=1))
        if not any(bool(weight.any()) for weight in some):
            return found  # all zeros: no evidence for other layers
        _k_blocks[kind] = found
    return _k_blocks[kind]


def int8_linear(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a W8A8 dynamic int8 layer, with the kernel that `levels` selects (LinearFactory)."""
    if levels().int8 == "warmd":
        from .native import panels

        return panels.int8_linear(weights, bias)
    return Int8Linear(weights, bias)


def int4_linear(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a W4A8 layer with a scale per group of inputs (LinearFactory)."""
    from .native import panels

    return panels.grouped_int4_linear(weights, bias)


def grouped_int8_linear(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a W8A8 layer with a scale per group of inputs (LinearFactory)."""
    from .native import panels

    return panels.grouped_int8_linear(weights, bias)


def bfloat16_linear(weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> LinearFn:
    """Return a bfloat16 layer in the form for its device (LinearFactory)."""
    if weights[0].device.type != "cpu":
        return CastLinear(weights, bias)
    if levels().bfloat16 == "storage":
        from .native import panels

        return panels.bfloat16_linear(weights, bias)
    return Bfloat16Linear(weights, bias)


def has_onednn(weight: torch.Tensor) -> bool:
    """Whether oneDNN is available for a layer with these weights."""
    return weight.device.type == "cpu" and onednn.is_available()


def forms_of(precision: str, weight: torch.Tensor) -> tuple[LinearFactory, ...]:
    """Return the form of a layer, or two: the initial one, and the packed one."""
    if precision == "int4":
        return (int4_linear,)
    if precision == HEAD_OF_INT4:
        return (grouped_int8_linear,)
    if precision == "int8":
        return (int8_linear,)
    if precision == "bf16":
        return (bfloat16_linear,)
    if has_onednn(weight) and weight.dtype == torch.float32:
        return (UnpackedLinear, compact_float32)
    return (PlainLinear,)


OnednnPacked = PackedLinear | Bfloat16Linear | Int8Linear


def panels_of(form: Linear) -> Any:
    """Return the native.panels.PanelLinear of a form, or None."""
    return getattr(form, "panels", None)
