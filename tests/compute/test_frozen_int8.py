"""Frozen int8 layers: forward as in the engine, backward with the same integers."""

from __future__ import annotations

import pytest
import torch
from needs import needs
from torch import nn

from warmd.jobs.compute.frozen_int8 import FrozenInt8Linear, quantize_linears
from warmd.jobs.compute.levels import levels
from warmd.jobs.compute.linear_forms import int8_linear
from warmd.jobs.compute.quantized import integers_of


@pytest.fixture(autouse=True)
def int8() -> None:
    needs(levels().int8 is not None, "int8 kernels")


def layer(*, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(96, 70, bias=bias)


@pytest.mark.parametrize("bias", [True, False])
def test_forward_has_the_bits_of_the_served_layer(bias):
    linear = layer(bias=bias)
    frozen = FrozenInt8Linear(linear)
    served = int8_linear([linear.weight.detach()], linear.bias.detach() if bias else None)
    x = torch.randn(3, 5, 96)
    assert torch.equal(frozen(x), served(x))
    torch.testing.assert_close(frozen(x), linear(x), rtol=0, atol=0.05)


def test_backward_is_that_of_the_weights_as_quantized():
    linear = layer()
    frozen = FrozenInt8Linear(linear)
    integers, scale = integers_of([linear.weight.detach()], torch.float32)
    as_quantized = integers.float() * scale[:, None]
    x, slope = torch.randn(4, 6, 96, requires_grad=True), torch.randn(4, 6, 70)
    frozen(x).backward(slope)
    torch.testing.assert_close(x.grad, slope @ as_quantized)
    assert linear.weight.grad is None
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    torch.testing.assert_close(as_quantized, linear.weight, rtol=0, atol=1e-3)


def test_the_weight_is_not_copied_and_the_head_is_kept():
    inner, head = layer(), layer()
    model = nn.Sequential(inner, nn.ReLU(), head)
    assert quantize_linears(model, kept=head) == 1
    assert isinstance(model[0], FrozenInt8Linear)
    assert model[0].weight is inner.weight
    assert model[2] is head
    assert quantize_linears(model, kept=head) == 0
