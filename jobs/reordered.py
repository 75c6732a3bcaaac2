"""A model's linear layers on copies of their weights in forms that are read faster.

Writing a token is a pass of a few rows through all weights: what it takes is the time of reading
them. In torch's own order they are not read at the memory's full speed; as 8-bit integers they are
a quarter of the bytes. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from .products import Make


@contextmanager
def replaced_layers(model: nn.Module, make: Make) -> Iterator[None]:
    """Have the linear layers of a float32 model compute as `make` has it, for a while.

    What they compute has no gradient, and is by the weights of the begin. The copies are gone
    afterwards; making them takes about the time of a few passes: for many passes of a few rows.
    The model is changed, for all threads: for one that is a job's own. `products.Replaced`, which
    changes none, takes 7 % more processor time for a pass of two rows through 0.5B parameters.
    """
    layers = [cast(nn.Linear, module) for module in model.modules() if _gains(module)]
    try:
        for layer in layers:
            bias = None if layer.bias is None else layer.bias.detach()
            vars(layer)["forward"] = make([layer.weight.detach()], bias)
        yield
    finally:
        for layer in layers:
            vars(layer).pop("forward", None)


def _gains(module: nn.Module) -> bool:
    if type(module) is not nn.Linear or module.weight.dtype != torch.float32:
        return False
    has_onednn = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return module.weight.device.type != "cpu" or has_onednn


class Reordered:
    """float32 in the order that oneDNN reads fastest; as much memory as the weights themselves."""

    def __init__(self, weights: Sequence[Tensor], bias: Tensor | None) -> None:
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            x, self._packed, self._bias, "none", [], ""
        )
        return y
