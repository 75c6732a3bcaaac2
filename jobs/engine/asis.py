"""Models of any other structure: their own forward pass, one sequence after the other.

Sequences still join and leave at any token, and each gets what it would get alone. They share no
computation, and no prefixes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from .parts import Part


class OwnCache:
    """The cache of the model's own kind for one sequence."""

    def __init__(self, cache: Any, length: int) -> None:
        self.cache = cache
        self.length = length


class AsIs:
    """Computes logits with the model's own forward."""

    chunk: int | None = None  # prompts are computed whole
    precision = "own"

    def __init__(self, model: Any) -> None:
        self._model = model

    def num_bytes(self, capacity: int) -> int:
        """The memory of a sequence, about: keys and values of every layer."""
        config = self._model.config.get_text_config()
        heads = config.num_attention_heads
        return int(
            2 * config.num_hidden_layers * config.hidden_size
            * getattr(config, "num_key_value_heads", heads) // heads
            * capacity * self._model.dtype.itemsize
        )  # fmt: skip

    def new(self, capacity: int) -> OwnCache:
        """Return an empty sequence."""
        from transformers import DynamicCache

        return OwnCache(DynamicCache(config=self._model.config), 0)

    def fork(self, kv: OwnCache, length: int, capacity: int) -> OwnCache:
        """Return a copy of a sequence; `length` is all of it."""
        return OwnCache(copy.deepcopy(kv.cache), length)

    def settle(self) -> bool:
        """Do nothing: it is as fast as it can be."""
        return False

    def forward(self, parts: Sequence[Part]) -> torch.Tensor:
        """Compute the parts; return the logits after each that wants them: (wanting, V)."""
        wanted = []
        for part in parts:
            out = self._model(
                input_ids=torch.tensor([part.ids], device=self._model.device),
                past_key_values=part.kv.cache,
                use_cache=True,
            )
            part.kv.length += len(part.ids)
            if part.wants_logits:
                wanted.append(out.logits[0, -1])
        return torch.stack(wanted) if wanted else torch.empty(0, 0)
