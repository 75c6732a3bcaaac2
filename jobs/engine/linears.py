"""Linear layers in the form that this machine computes fastest, and alike for any batch.

The same row must give the same bits whatever other rows are computed beside it: then a request
gets the tokens that it would get alone. Libraries choose other kernels for few rows, so each form
says what number of rows must be rounded up to (`quantum`), and that is measured, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn import functional

from ..products import Bfloat16Linear, Int8Linear, is_bfloat16_faster

_QUANTA = (1, 2, 4, 8, 16, 32)
_PROBED_ROWS = 64


class Linear(Protocol):
    """y = x W^T + b. x: (rows, in), rows a multiple of the quantum; y: (rows, out)."""

    def __call__(self, x: torch.Tensor, /) -> torch.Tensor: ...


class PlainLinear:
    """PyTorch's own, on the weights where they are: no copy."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """float32 on a CPU, by oneDNN: first on the weights where they are, later on a packed copy.

    oneDNN wants them in an order of its own. To bring a 0.5B model into it takes seconds, which a
    first token should not wait for: so each layer is packed after some calls of its own, one after
    the other. The bits are the same. Per CPU second on an AMD EPYC with AVX-512, against PyTorch's
    own (MKL): 1.2 times as fast for one row, 1.8 for 16 and 2.1 for 64; packed 1.5, 2.3 and 2.3.
    """

    def __init__(
        self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, *, patience: int
    ) -> None:
        """`patience`: calls before it is packed."""
        self._weights = list(weights)
        self._bias = bias
        self._patience = patience
        self._packed: torch.Tensor | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            if self._patience > 0:
                self._patience -= 1
                return self.plain(x)
            self.pack()
        return _product(x, self._packed, self._bias)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """Compute on the weights as they are."""
        if len(self._weights) == 1:
            return _product(x, self._weights[0], self._bias)
        y = torch.cat([_product(x, weight, None) for weight in self._weights], dim=1)
        return y if self._bias is None else y.add_(self._bias)

    def pack(self) -> None:
        """Bring the weights into oneDNN's order."""
        weight = self._weights[0] if len(self._weights) == 1 else torch.cat(self._weights)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)


def _product(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y


def served_precision(asked: str, weight: torch.Tensor) -> str:
    """Return "int8", "bf16" or "own", the dtype that the weights have: what is served as `asked`.

    int8 is for a CPU, and bf16 for one that is measured to be faster with it.
    """
    if asked == "int8" and _has_onednn(weight):
        return "int8"
    if asked == "bf16" and _has_onednn(weight) and is_bfloat16_faster():
        return "bf16"
    return "own"


def _has_onednn(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def linear(
    layers: Sequence[torch.nn.Linear | torch.nn.Embedding], *, precision: str, patience: int
) -> Linear:
    """Return layers of one input as one layer, their outputs side by side.

    `precision`: what `served_precision` returned. `patience`: see PackedLinear.
    """
    weights = [layer.weight.detach() for layer in layers]
    bias = _bias(layers, weights)
    if precision == "int8":
        return Int8Linear(weights, bias)
    if precision == "bf16":
        return Bfloat16Linear(weights, bias)
    if _has_onednn(weights[0]) and weights[0].dtype == torch.float32:
        return PackedLinear(weights, bias, patience=patience)
    return PlainLinear(weights[0] if len(weights) == 1 else torch.cat(weights), bias)


def _bias(
    layers: Sequence[torch.nn.Linear | torch.nn.Embedding], weights: list[torch.Tensor]
) -> torch.Tensor | None:
    biases = [getattr(layer, "bias", None) for layer in layers]
    if all(bias is None for bias in biases):
        return None
    return torch.cat(
        [
            weight.new_zeros(len(weight)) if bias is None else bias.detach()
            for bias, weight in zip(biases, weights, strict=True)
        ]
    )


def row_quantum(layer: Linear, width: int, like: torch.Tensor) -> int | None:
    """Return what numbers of rows must be multiples of, for rows not to depend on each other.

    None when no number of rows does. Tried on `layer`, which takes rows of `width` and is packed
    by it, with the number of threads that this thread has.
    """
    generator = torch.Generator(like.device).manual_seed(0)
    x = torch.randn(_PROBED_ROWS, width, generator=generator, device=like.device, dtype=like.dtype)
    forms: list[Linear] = [layer]
    if isinstance(layer, PackedLinear):
        layer.pack()
        forms.append(layer.plain)
    whole = layer(x)
    for quantum in _QUANTA:
        counts = {*range(quantum, min(8 * quantum, _PROBED_ROWS), quantum), _PROBED_ROWS // 2}
        if all(torch.equal(form(x[-count:]), whole[-count:]) for count in counts for form in forms):
            return quantum
    return None
