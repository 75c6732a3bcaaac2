"""Attention in packs: several sequences in one row of tokens, each attending only to itself.

transformers' models run unchanged: they call attention through a registered function, and all
other layers of a decoder are position-wise. Imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from ..engine.decoder import Decoder
from ..models.adapters import unwrapped
from .lora_linear import fused_lora

ATTENTION = "warmd_packed"  # the name under which transformers finds `_attention`


def can_pack(model: Any) -> bool:
    """Whether a model supports packs.

    It does if the engine's decoder supports it: then tokens interact only through full causal
    attention, and positions come only from position_ids. Tests compare each architecture with TRL.
    """
    model = unwrapped(model)
    config = model.config
    return (
        Decoder.supports(model)
        and config is config.get_text_config()  # vision-language models have 3-axis positions
        and getattr(model, "_supports_sdpa", False)
        and not config.attention_dropout
        and model.get_output_embeddings().bias is None
    )


class Attention(Protocol):
    """The attention of one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the attention output of one layer.

        query: (B, heads, N, D); key, value: (B, key heads, N, D). The result is (B, N, heads, D).
        """


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """Make a model use the `Attention` given to `hidden_states` within this block.

    Its LoRA layers are fused (`lora_linear`).
    """
    usual = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        with fused_lora(model):
            yield
    finally:
        model.config._attn_implementation = usual


def hidden_states(model: Any, embedded: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Run a model up to its vocabulary head; only inside `packed_attention`.

    embedded: (B, N, H), positions: (B, N) int64; the result is (B, N, H).
    """
    output = unwrapped(model).base_model(
        inputs_embeds=embedded, position_ids=positions, use_cache=False, packed=attention
    )
    states: Tensor = output.last_hidden_state
    return states


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    packed: Attention,
    **_: Any,
) -> tuple[Tensor, None]:
    return packed.attend(module.layer_idx, query, key, value, scaling), None


AttentionInterface.register(ATTENTION, _attention)


def causal(query: Tensor, key: Tensor, value: Tensor, tokens: slice, scale: float) -> Tensor:
    """Return the causal attention within one sequence of a pack: (tokens, heads, D).

    query: (1, heads, N, D); key, value: (1, key heads, N, D), of the whole pack.
    """
    seen = F.scaled_dot_product_attention(
        query[:, :, tokens],
        key[:, :, tokens],
        value[:, :, tokens],
        is_causal=True,
        scale=scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return seen[0].transpose(0, 1)
