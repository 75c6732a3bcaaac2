"""Linear layers in fewer bits than float32: 8-bit integers on a CPU, and bfloat16.

For inference: they have no gradient. The same row gives the same bits whatever rows are computed
beside it: sums of integers are exact, and of bfloat16 `engine/linears.py` sees to it. Imports
torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .engine.turns import compute_with

Product = Callable[[Tensor], Tensor]  # y = x W^T + b. x: (..., in), y: (..., out)
# From weights (out, in), whose outputs stand side by side, and their bias.
Make = Callable[[Sequence[Tensor], Tensor | None], Product]

_LARGEST = 127  # of a signed byte, leaving -128 alone: symmetric
_OFFSET = 128  # of the inputs: oneDNN's kernels for signed ones are 1,000 times slower
_ROUNDED_OFFSET = torch.tensor(_OFFSET + 0.5)  # a cast to integers cuts off
_BLOCK = 256  # rows of weights that are made integers at once: no copy of all comes and goes
_TRIED = (1024, 4096)  # the layer that the two formats are tried on: inputs, outputs
_TRIALS = 5


class Int8Linear:
    """8-bit integers: x W = s_x s_W (q_x q_W), where q = round(127 x / max |x|).

    A scale for each output and, found anew for each, one for each row of x.
    """

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        """`weights`: (out, in) each, of one input; their outputs stand side by side."""
        integers, scale = _integers_of(weights, torch.float32)
        self.shape: tuple[int, int] = (len(integers), integers.shape[1])
        self.scale = scale / _LARGEST  # that of a row of x is its largest then
        self.packed = torch.ops.onednn.qlinear_prepack(integers, None)
        self._multiply: Any = torch.ops.onednn.qlinear_pointwise.default
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
        y: Tensor = self._multiply(
            integers, 1.0, _OFFSET, self.packed, self.scale, self._zeros,
            None, 1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        return y.mul_(largest) if self.bias is None else torch.addcmul(self.bias, y, largest)


class WeightOnlyInt8Linear:
    """8-bit weights, in torch's own order, by rows of bfloat16: for a few rows, soon thrown away.

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


def bfloat16_linear(weights: Sequence[Tensor], bias: Tensor | None) -> Product:
    """Return a layer in bfloat16 in the form that its device takes (a Make)."""
    form = Bfloat16Linear if weights[0].device.type == "cpu" else CastLinear
    return form(weights, bias)


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
        self.packed = torch.ops.mkldnn._reorder_linear_weight(halves, None)
        self.bias = None if bias is None else bias.to(torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x.to(torch.bfloat16), self.packed, self.bias, "none", [], ""
        )
        return y.to(x.dtype)


@lru_cache(maxsize=1)
def is_bfloat16_faster() -> bool:
    """Whether this machine computes faster in bfloat16 than in float32, one row and many.

    Tried, because CPUs without units for it say that they support it: they emulate it, several
    times slower. In a thread that ends, and its helpers with it: who asks may be a thread that is
    to have none (engine/turns.py).
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, initializer=compute_with, initargs=(threads,)) as trying:
        return trying.submit(_try_bfloat16).result()


def _try_bfloat16() -> bool:
    """Return whether it is faster, tried in turn, as others may compute at the same time: 0.1 s."""
    inputs, outputs = _TRIED
    weight = torch.full((outputs, inputs), 0.5)  # no random numbers: a job may count on its own
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
    half = Bfloat16Linear([weight], None)

    def single(x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, packed, None, "none", [], "")
        return y

    for rows in (1, 64):
        x = torch.full((rows, inputs), 0.5)
        for product in (half, single):
            product(x)  # the first call is a matter of its own
        trials = [(_seconds(half, x), _seconds(single, x)) for _ in range(_TRIALS)]
        of_half, of_single = map(min, zip(*trials, strict=True))
        if not of_half < of_single:
            return False
    return True


def _seconds(product: Product, x: Tensor) -> float:
    begun = time.perf_counter()
    product(x)
    return time.perf_counter() - begun


class Replaced:
    """Other products in the place of a model's linear layers, without a change to the model.

    For models that several jobs use at the same time, each in a thread of its own.
    """

    def __init__(self, model: nn.Module, make: Make) -> None:
        # By identity: who keeps these products keeps the model, too.
        self._layers = {
            id(module.weight): make(
                [module.weight.detach()], None if module.bias is None else module.bias.detach()
            )
            for module in model.modules()
            if isinstance(module, nn.Linear)
        }

    def in_place(self) -> AbstractContextManager[Any]:
        """Return a context in which this thread computes by them."""
        return _Linear(self._layers)


class _Linear(TorchFunctionMode):
    """Has products by the identity of their weight compute what `F.linear` is asked for."""

    def __init__(self, layers: dict[int, Product]) -> None:
        super().__init__()
        self._layers = layers

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not kwargs:
            product = self._layers.get(id(args[1]))
            if product is not None:
                return product(args[0])
        return func(*args, **(kwargs or {}))
