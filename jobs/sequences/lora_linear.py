"""LoRA layers in packs: the linear layer and its low-rank update in one autograd node.

y = W x + s B A x (Hu et al. 2021, arXiv:2106.09685). PEFT scales B A x and adds it to W x, and
autograd adds the two gradients of x: passes over tensors of the size of y or x. Here GEMMs
accumulate in place. Results are PEFT's except for rounding. Imports torch and peft.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn

from ..compute.frozen_int8 import FrozenInt8Linear


@contextmanager
def fused_lora(model: nn.Module) -> Iterator[None]:
    """Compute a model's LoRA layers as one node each within this block; see `_is_supported`."""
    layers = [layer for layer in model.modules() if _is_supported(layer)]
    for layer in layers:
        layer.forward = partial(_forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _is_supported(layer: Any) -> bool:
    """Whether a layer has one plain float32 adapter without dropout, on a frozen layer on a CPU.

    Others are left to PEFT.
    """
    if type(layer) is not LoraLinear or layer.merged or len(layer.active_adapters) != 1:
        return False
    if "forward" in vars(layer):  # in an inner block
        return False
    base, (name,) = layer.base_layer, layer.active_adapters
    return (
        name in layer.lora_A
        and name not in layer.lora_variant
        and type(layer.lora_dropout[name]) is nn.Identity
        and layer.lora_B[name].bias is None
        and type(base) in (nn.Linear, FrozenInt8Linear)
        and not base.weight.requires_grad
        and base.weight.device.type == "cpu"
        and base.weight.dtype == layer.lora_A[name].weight.dtype == torch.float32
    )


def _forward(layer: Any, x: Tensor) -> Tensor:
    """Replace the `forward` of a LoRA layer: x (..., in), y (..., out)."""
    if layer.disable_adapters:
        return cast(Tensor, layer.base_layer(x))
    (name,) = layer.active_adapters
    y = cast(Any, _Adapted).apply(
        x.reshape(-1, x.shape[-1]),
        layer.lora_A[name].weight,
        layer.lora_B[name].weight,
        layer.base_layer,
        layer.scaling[name],
    )
    return cast(Tensor, y.view(*x.shape[:-1], -1))


class _Adapted(torch.autograd.Function):
    """x: (rows, in), a: (rank, in), b: (out, rank), all float32; y: (rows, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, a: Tensor, b: Tensor, base: nn.Linear, scale: float) -> Tensor:
        h = x @ a.t()
        ctx.save_for_backward(x, a, b, h)
        ctx.base, ctx.scale = base, scale
        return cast(Tensor, base(x)).addmm_(h, b.t(), alpha=scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, a, b, h = ctx.saved_tensors
        (of_y,) = gradients
        of_h = (of_y @ b).mul_(ctx.scale)
        of_x = None
        if ctx.needs_input_grad[0]:
            base = ctx.base
            is_int8 = isinstance(base, FrozenInt8Linear)
            of_x = base.transposed(of_y) if is_int8 else of_y @ base.weight
            of_x.addmm_(of_h, a)
        return of_x, of_h.t() @ x, (of_y.t() @ h).mul_(ctx.scale), None, None
