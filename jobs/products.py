"""Products of 8-bit integers for the linear layers of a model, without a change to the model.

For inference: they have no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

_LARGEST = 127  # of a signed byte, leaving -128 alone: symmetric


class _Linear(TorchFunctionMode):
    """Has `product(x, weight, bias)` compute what `F.linear` is asked for, in this thread."""

    def __init__(self, product: Callable[[Tensor, Tensor, Tensor | None], Tensor | None]) -> None:
        super().__init__()
        self._product = product

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and not kwargs:
            x, weight, bias = (*args, None)[:3]
            result = self._product(x, weight, bias)
            if result is not None:
                return result
        return func(*args, **(kwargs or {}))


def int8_linear(weights: Int8Weights) -> AbstractContextManager[Any]:
    """Return a context in which the linear layers of a model multiply 8-bit integers."""
    return _Linear(weights.product)


class Int8Weights:
    """The weights of a model's linear layers as 8-bit integers, beside its own.

    A scale for each output and, found anew for each token, one for each input: x W = s_x s_W (q_x
    q_W), where q = round(127 x / max |x|).
    """

    def __init__(self, model: nn.Module) -> None:
        # By identity: who keeps these weights keeps the model, too.
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        for module in model.modules():
            if isinstance(module, nn.Linear):
                quantised, scale = _quantised(module.weight.detach().float())
                self._layers[id(module.weight)] = quantised.t(), scale.squeeze(1)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return x @ weight.T + bias, or None for a weight that is not of the model."""
        layer = self._layers.get(id(weight))
        if layer is None:
            return None
        transposed, weight_scale = layer
        quantised, scale = _quantised(x.reshape(-1, x.shape[-1]))
        sums = torch._int_mm(quantised, transposed)
        result = sums * scale
        if bias is None:
            result *= weight_scale
        else:
            result = torch.addcmul(bias, result, weight_scale)
        return result.view(*x.shape[:-1], -1)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows of x (N, K) as int8, and what each is to be multiplied by (N, 1)."""
    scale = x.abs().amax(1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / _LARGEST
    return (x / scale).round_().to(torch.int8), scale
