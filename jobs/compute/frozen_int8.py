"""A frozen linear layer with int8 weights, for training: the base of an adapter.

Forward it is the W8A8 layer that the engine serves (`linear_forms.int8_linear`), so that a
completion and its loss come from the same weights. Backward it multiplies by the same integers in
float32; gradients pass through the rounding of the inputs unchanged (straight-through estimator,
Bengio et al. 2013, arXiv:1308.3432). Imports torch.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from .linear_forms import int8_linear
from .quantized import integers_of


class FrozenInt8Linear(nn.Linear):
    """y = x W^T + b in int8 for x (..., in), without gradients of W and b. For a CPU.

    `weight` stays the weight of the layer that it replaces, (out, in) and not copied: the rollout's
    decoder quantizes it by itself, to the same integers.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight.requires_grad_(False)
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)
        weight = [linear.weight.detach()]
        self._int8 = int8_linear(weight, None if self.bias is None else self.bias.detach())
        self._integers, self._scale = integers_of(weight, torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, cast(Any, _Int8Linear).apply(x, self))

    def multiply(self, x: Tensor) -> Tensor:
        """Return y for x (..., in), without a gradient."""
        return self._int8(x)

    def transposed(self, y: Tensor) -> Tensor:
        """Return y W for y (..., out) in float32, W as quantized."""
        return y @ self._integers.float().mul_(self._scale[:, None])


class _Int8Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: FrozenInt8Linear) -> Tensor:
        ctx.layer = layer
        return layer.multiply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        layer: FrozenInt8Linear = ctx.layer
        return layer.transposed(gradients[0]) if ctx.needs_input_grad[0] else None, None


def quantize_linears(model: nn.Module, *, kept: nn.Module | None) -> int:
    """Replace all linear layers of a model except `kept` by int8 ones; return their number."""
    found = [
        (parent, name, module)
        for parent in model.modules()
        for name, module in parent.named_children()
        if type(module) is nn.Linear and module is not kept
    ]
    for parent, name, module in found:
        setattr(parent, name, FrozenInt8Linear(module))
    return len(found)
