"""How long a text a model can take. Imports torch: only `run` of a kind imports it."""

from __future__ import annotations

from typing import Any

from torch import nn


def positions(model: Any) -> int | None:
    """Return how many tokens the model's positions are for, or None where it has no limit."""
    limit: int | None = getattr(model.config, "max_position_embeddings", None)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.num_embeddings == limit:
            # RoBERTa's positions begin after that of the padding.
            return limit if module.padding_idx is None else limit - module.padding_idx - 1
    return limit
