"""The layers of a Llama-like decoder, taken from a transformers model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..compute.linear_forms import Linear
from ..compute.linears import LinearBuilder, UniformBuilder
from ..models.adapters import unwrapped
from .layer_ops import Norms
from .low_rank import base_layer


@dataclass(frozen=True)
class Layer:
    attention_norm: torch.Tensor
    qkv: Linear
    head_norms: Norms | None
    out: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear

    @property
    def norms(self) -> tuple[torch.Tensor, ...]:
        """RMSNorm weights: before attention and the MLP; of queries and keys, if there are any."""
        return self.attention_norm, self.mlp_norm, *(self.head_norms or ())


def layer_of(layer: Any, linears: LinearBuilder | UniformBuilder, *, patience: int) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp

    def fused(*layers: torch.nn.Module) -> Linear:
        return linears.fused([base_layer(one) for one in layers], patience=patience)

    has_head_norms = hasattr(attention, "q_norm")
    return Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=fused(attention.q_proj, attention.k_proj, attention.v_proj),
        head_norms=(attention.q_norm.weight.detach(), attention.k_norm.weight.detach())
        if has_head_norms
        else None,
        out=fused(attention.o_proj),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_up=fused(mlp.gate_proj, mlp.up_proj),
        down=fused(mlp.down_proj),
    )


def text_model(model: Any) -> Any:
    """Return the text decoder of a model, which may also have a vision tower."""
    inner = getattr(unwrapped(model), "model", None)
    return getattr(inner, "language_model", inner)


def num_deep_layers(model: Any) -> int:
    """Return the number of layers after which image features are added (Qwen3-VL)."""
    vision = getattr(model.config, "vision_config", None)
    return len(getattr(vision, "deepstack_visual_indexes", None) or ())
