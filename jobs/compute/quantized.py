"""Quantized linear layers: dynamic int8 (W8A8), weight-only int8, and bfloat16.

For inference: there is no gradient. Layers are batch-invariant: int8 sums are exact, and for
bfloat16 `batch_invariance.py` pads the rows. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from . import onednn

LinearFn = Callable[[Tensor], Tensor]  # y = x W^T + b. x: (..., in), y: (..., out)
# Takes weights (out, in), whose outputs are concatenated, and their bias (out,).
LinearFactory = Callable[[Sequence[Tensor], Tensor | None], LinearFn]

_LARGEST = 127  # int8 without -128: symmetric quantization
_ROUNDED_OFFSET = torch.tensor(onednn.ZERO_POINT + 0.5)  # a cast to integers truncates
_BLOCK = 256  # rows of weights that are quantized at once, to limit temporary memory


class Int8Linear:
    """W8A8 dynamic quantization by oneDNN: x W = s_x s_W (q_x q_W), q = round(127 x / max |x|).

    Weights have a scale per output (static), inputs one per row (computed at each call).
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """`weights`: (out, in) each, with the same input; their outputs are concatenated."""
        integers, scale = integers_of(weights, torch.float32)
        self.shape: tuple[int, int] = (len(integers), integers.shape[1])
        self.scale = scale / _LARGEST  # the scale of a row of x is its absmax then
        self.packed = onednn.pack_int8(integers)
        self._zeros = torch.zeros(len(scale), dtype=torch.int64)
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim == 2 and x.dtype == torch.float32:
            return self._of_rows(x)
        y = self._of_rows(x.reshape(-1, x.shape[-1]).float())
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def _of_rows(self, rows: Tensor) -> Tensor:
        # Few operations: for one row of a small layer they take as long as the GEMV.
        largest = _largest_of(rows)
        integers = torch.addcmul(_ROUNDED_OFFSET, rows, _LARGEST / largest).to(torch.uint8)
        y = onednn.linear_int8(integers, self.packed, self.scale, self._zeros)
        return y.mul_(largest) if self.bias is None else torch.addcmul(self.bias, y, largest)


class WeightOnlyInt8Linear:
    """Weight-only int8 with bfloat16 inputs, unpacked: for few rows and short-lived weights.

    oneDNN takes 1.7 s to pack 0.5B weights. A pass of 2 rows takes 38 ms packed and 43 ms unpacked;
    with 16 rows unpacked takes five times as long.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """`weights`: (out, in) each, with the same input; their outputs are concatenated."""
        self._integers, self._scale = integers_of(weights, torch.bfloat16)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(x.bfloat16(), self._integers, self._scale).to(x.dtype)
        return y if self._bias is None else y.add_(self._bias)


def integers_of(weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize weights (out, in) to one int8 tensor; return it and scales (out,) of dtype."""
    outputs = sum(map(len, weights))
    integers = torch.empty(outputs, weights[0].shape[1], dtype=torch.int8)
    scales = torch.empty(outputs, dtype=dtype)
    row = 0
    for block in (block for weight in weights for block in torch.split(weight, _BLOCK)):
        rows = slice(row, row + len(block))
        block = block.float()
        scale = (_largest_of(block) / _LARGEST).to(dtype)
        scales[rows] = scale[:, 0]
        integers[rows] = (block / scale).round_()
        row += len(block)
    return integers, scales


def _largest_of(rows: Tensor) -> Tensor:
    """Return the absmax of each row, at least 1e-10: (N, K) to (N, 1)."""
    return rows.abs().amax(1, keepdim=True).clamp_(min=1e-10)


class CastLinear:
    """bfloat16 on a GPU, unpacked. Accumulates in float32."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """`weights`: (out, in) each, with the same input; their outputs are concatenated."""
        self._weight = torch.cat([weight.to(torch.bfloat16) for weight in weights])
        self._bias = None if bias is None else bias.to(torch.bfloat16)

    def copy(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """Take over other weights in the same memory, which a CUDA graph may read."""
        row = 0
        for weight in weights:
            self._weight[row : row + len(weight)].copy_(weight)
            row += len(weight)
        if self._bias is not None and bias is not None:
            self._bias.copy_(bias)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), self._weight, self._bias).to(x.dtype)


class Bfloat16Linear:
    """bfloat16 on a CPU by oneDNN, packed. Accumulates in float32."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """`weights`: (out, in) each, with the same input; their outputs are concatenated."""
        halves = torch.cat([weight.to(torch.bfloat16) for weight in weights])
        self.shape: tuple[int, int] = (len(halves), halves.shape[1])
        self.packed = onednn.pack(halves)
        self.bias = None if bias is None else bias.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        return onednn.linear(x.to(torch.bfloat16), self.packed, self.bias).to(x.dtype)


class SwappedLinears:
    """Replaces a model's linear layers within one thread, without changing the model.

    For models that several jobs use concurrently, each in its own thread.
    """

    def __init__(self, model: nn.Module, make: LinearFactory) -> None:
        # Keyed by identity, so they must not outlive the model.
        self._layers = {
            id(module.weight): make(
                [module.weight.detach()], None if module.bias is None else module.bias.detach()
            )
            for module in model.modules()
            if isinstance(module, nn.Linear)
        }

    def in_place(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread uses the replacements."""
        return _Linear(self._layers)


class _Linear(TorchFunctionMode):
    """Replaces `F.linear` by the layer for its weight, if there is one."""

    def __init__(self, layers: dict[int, LinearFn]) -> None:
        super().__init__()
        self._layers = layers

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not kwargs:
            layer = self._layers.get(id(args[1]))
            if layer is not None:
                return layer(args[0])
        return func(*args, **(kwargs or {}))
