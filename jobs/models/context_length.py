"""The context length of a model. Imports torch: only `run` of a kind imports it."""

from __future__ import annotations

from typing import Any

from torch import nn


def positions(model: Any) -> int | None:
    """Return the context length of an encoder in tokens, or None if it has no limit."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == limit:
            # RoBERTa's positions start after the padding index.
            return limit if module.padding_idx is None else limit - module.padding_idx - 1
    return limit
