"""Matrix products in float32 on a CPU by oneDNN, which torch leaves to MKL.

On processors that MKL does not know as Intel's it runs at half their speed, also for the few rows
of a decoding step; oneDNN does not ask for the maker, and where it has a copy of the weights in an
order of its own, reads them at the speed of the memory. Elsewhere all of this is torch's own.
Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn


def is_faster(tensor: Tensor) -> bool:
    """Whether products of this tensor are to be made by oneDNN."""
    return (
        tensor.device.type == "cpu"
        and tensor.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias. x: (..., I), weight: (O, I), bias: (O,); it has no gradient."""
    if not is_faster(weight) or not x.numel():
        return nn.functional.linear(x, weight, bias)
    return _onednn(x, weight, bias)


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


class _Linear(torch.autograd.Function):
    """x @ weight.T + bias with a gradient for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        gradient = gradients[0]
        rows = gradient.reshape(-1, gradient.shape[-1])
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(gradient, weight.t()) if needs_x else None,
            product(rows.t(), x.reshape(len(rows), -1).t()) if needs_weight else None,
            rows.sum(0) if needs_bias else None,
        )


class FastLinear(nn.Linear):
    """A linear layer by oneDNN; `packed` are its weights in oneDNN's order, while there are any."""

    packed: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is not None:
            return _onednn(x, self.packed, self.bias)
        y: Tensor = cast(Any, _Linear).apply(x, self.weight, self.bias)
        return y


def speed_up(model: nn.Module) -> None:
    """Have a model's linear layers computed by oneDNN, where that is faster."""
    for module in model.modules():
        if type(module) is nn.Linear and is_faster(module.weight):
            module.__class__ = FastLinear


@contextmanager
def packed_weights(model: nn.Module) -> Iterator[None]:
    """Keep copies of the weights in oneDNN's order for as long as this lasts.

    They take as much memory as the weights themselves, and a fraction of the time of a few passes:
    for many passes of a few rows without gradients.
    """
    layers = [module for module in model.modules() if type(module) is FastLinear]
    try:
        for layer in layers:
            layer.packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), None)
        yield
    finally:
        for layer in layers:
            layer.packed = None
