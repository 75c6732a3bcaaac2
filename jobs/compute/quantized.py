"""Linear layers in fewer bits than float32: dynamic int8 (W8A8), weight-only int8 and bfloat16.

For inference: they have no gradient. The same row gives the same bits whatever rows are computed
with it: sums of int8 are exact, and of bfloat16 `linears.py` sees to it. Imports torch.
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
# From weights (out, in), whose outputs stand side by side, and their bias.
LinearFactory = Callable[[Sequence[Tensor], Tensor | None], LinearFn]

_LARGEST = 127  # of a signed byte, leaving -128 alone: symmetric
_ROUNDED_OFFSET = torch.tensor(onednn.ZERO_POINT + 0.5)  # a cast to integers cuts off
_BLOCK = 256  # rows of weights that are made integers at once: no copy of all comes and goes


class Int8Linear:
    """Dynamic int8 by oneDNN: x W = s_x s_W (q_x q_W), where q = round(127 x / max |x|).

    A scale for each output and, found anew at each call, one for each row of x.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """`weights`: (out, in) each, of one input; their outputs stand side by side."""
        integers, scale = _integers_of(weights, torch.float32)
        self.shape: tuple[int, int] = (len(integers), integers.shape[1])
        self.scale = scale / _LARGEST  # that of a row of x is its largest then
        self.packed = onednn.pack_int8(integers)
        self._zeros = torch.zeros(len(scale), dtype=torch.int64)
        self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        if x.ndim == 2 and x.dtype == torch.float32:
            return self._of_rows(x)
        y = self._of_rows(x.reshape(-1, x.shape[-1]).float())
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    def _of_rows(self, rows: Tensor) -> Tensor:
        # Each operation counts: at one row of a small layer they take as long as the product.
        largest = _largest_of(rows)
        integers = torch.addcmul(_ROUNDED_OFFSET, rows, _LARGEST / largest).to(torch.uint8)
        y = onednn.linear_int8(integers, self.packed, self.scale, self._zeros)
        return y.mul_(largest) if self.bias is None else torch.addcmul(self.bias, y, largest)


class WeightOnlyInt8Linear:
    """Weight-only int8, in torch's own order, by rows of bfloat16: for few rows, thrown away soon.

    To pack 0.5B weights takes oneDNN 1.7 s. A pass of 2 rows then takes 38 ms, unpacked 43 ms; 16
    rows take five times as long as packed.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """`weights`: (out, in) each, of one input; their outputs stand side by side."""
        self._integers, self._scale = _integers_of(weights, torch.bfloat16)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y = torch._weight_int8pack_mm(x.bfloat16(), self._integers, self._scale).to(x.dtype)
        return y if self._bias is None else y.add_(self._bias)


def _integers_of(weights: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights (out, in) as one of 8-bit integers, and the scale of each output: (out,) of dtype."""
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
    """The largest absolute value of each row (N, K), and no zero: (N, 1)."""
    return rows.abs().amax(1, keepdim=True).clamp_(min=1e-10)


class CastLinear:
    """bfloat16 on a GPU, in torch's own order. Sums are float32."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """`weights`: (out, in) each, of one input; their outputs stand side by side."""
        self._weight = torch.cat([weight.to(torch.bfloat16) for weight in weights])
        self._bias = None if bias is None else bias.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x.to(torch.bfloat16), self._weight, self._bias).to(x.dtype)


class Bfloat16Linear:
    """bfloat16 on a CPU, in the order that oneDNN reads fastest. Sums are float32."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """`weights`: (out, in) each, of one input; their outputs stand side by side."""
        halves = torch.cat([weight.to(torch.bfloat16) for weight in weights])
        self.shape: tuple[int, int] = (len(halves), halves.shape[1])
        self.packed = onednn.pack(halves)
        self.bias = None if bias is None else bias.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        return onednn.linear(x.to(torch.bfloat16), self.packed, self.bias).to(x.dtype)


class SwappedLinears:
    """Swaps a model's linear layers for others without a change to the model.

    For models that several jobs use at the same time, each in a thread of its own.
    """

    def __init__(self, model: nn.Module, make: LinearFactory) -> None:
        # By identity: these layers must not outlive the model.
        self._layers = {
            id(module.weight): make(
                [module.weight.detach()], None if module.bias is None else module.bias.detach()
            )
            for module in model.modules()
            if isinstance(module, nn.Linear)
        }

    def in_place(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread computes with them."""
        return _Linear(self._layers)


class _Linear(TorchFunctionMode):
    """Computes `F.linear` by the layer that stands for its weight, if there is one."""

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
