"""LoRA layers as one autograd node: the results and gradients of PEFT."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from needs import needs
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from warmd.jobs.compute.frozen_int8 import quantize_linears
from warmd.jobs.compute.levels import levels
from warmd.jobs.sequences.lora_linear import fused_lora


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 192), nn.Linear(192, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(self.up(x).tanh())
        return y


def with_adapter(*, is_int8: bool = False, **settings: Any) -> Any:
    torch.manual_seed(0)
    layers = Layers()
    if is_int8:
        quantize_linears(layers, kept=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an attribute that transformers deprecates
        model = get_peft_model(
            layers, LoraConfig(r=4, lora_alpha=32, target_modules=["up", "down"], **settings)
        )
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight, std=0.1)
    return model


def results(model: Any) -> list[Tensor]:
    """The outputs, and the gradients of the input and of the adapter."""
    torch.manual_seed(1)
    x = torch.randn(2, 5, 64, requires_grad=True)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *trained])]


def nodes(y: Tensor) -> set[str]:
    """The names of the autograd nodes that computed y."""
    found, left = set[str](), [y.grad_fn]
    while left:
        if (node := left.pop()) is not None:
            found.add(type(node).__name__)
            left += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize("is_int8", [False, True])
def test_outputs_and_gradients_are_those_of_peft(is_int8):
    needs(not is_int8 or levels().int8 is not None, "int8")
    model = with_adapter(is_int8=is_int8)
    expected = results(model)
    with fused_lora(model):
        found = results(model)
        assert "MulBackward0" not in nodes(model(torch.ones(1, 64)))  # by the scale
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    assert all(torch.equal(a, b) for a, b in zip(results(model), expected, strict=True))


@pytest.mark.parametrize("settings", [{"lora_dropout": 0.5}, {"use_dora": True}])
def test_other_adapters_are_left_to_peft(settings):
    model = with_adapter(**settings)
    expected = results(model)
    with fused_lora(model):
        assert all(torch.equal(a, b) for a, b in zip(results(model), expected, strict=True))


def test_a_disabled_adapter_adds_nothing():
    model = with_adapter()
    x = torch.randn(3, 64)
    plain = Layers()
    plain.load_state_dict(
        {
            "up.weight": model.base_model.up.weight,
            **{"up.bias": model.base_model.up.bias, "down.weight": model.base_model.down.weight},
        }
    )
    with fused_lora(model), fused_lora(model):  # the inner block changes nothing
        assert not torch.allclose(model(x), plain(x), atol=1e-2)
        with model.disable_adapter():
            assert torch.equal(model(x), plain(x))
