"""Attention in packs: several sequences in one row of tokens, each of which sees itself alone.

The models are those of transformers, as they are: it hands its attention to a function by name, and
all else in a decoder looks at one token at a time. Imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from ..engine.decoder import Decoder

ATTENTION = "warmd_packed"  # by this name transformers finds `_attention`


def can_pack(model: Any) -> bool:
    """Whether a model can be given packs.

    Those can that the engine's decoder takes: their layers know of other tokens through attention
    alone, all of it causal and full, and of positions through position_ids alone. Each kind is held
    against TRL's own way in the tests.
    """
    config = model.config
    return (
        Decoder.takes(model)
        and config is config.get_text_config()  # one that takes pictures has positions of 3 axes
        and getattr(model, "_supports_sdpa", False)
        and not config.attention_dropout
        and model.get_output_embeddings().bias is None
    )


class Attention(Protocol):
    """Who sees whom in one forward pass."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return what the queries see in one layer.

        query: (B, heads, N, D); key, value: (B, key heads, N, D). The result is (B, N, heads, D).
        """


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """Have a model ask the `Attention` that `hidden_states` is given, for as long as this lasts."""
    usual = model.config._attn_implementation
    model.config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        model.config._attn_implementation = usual


def hidden_states(model: Any, embedded: Tensor, positions: Tensor, attention: Attention) -> Tensor:
    """Run a model up to its vocabulary head. Inside `packed_attention` only.

    embedded: (B, N, H), positions: (B, N) int64; the result is (B, N, H).
    """
    output = model.base_model(
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
    """Return what the tokens of one sequence see, each up to itself: (tokens, heads, D).

    query: (1, heads, N, D); key, value: (1, key heads, N, D), of the whole row.
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
