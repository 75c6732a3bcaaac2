"""Inputs of a forward pass: the next tokens of each sequence, and attention as a callback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Attention of one layer: (qkv, layer number) -> outputs (tokens, heads, head_dim), where
# qkv (tokens, heads + 2 kv_heads, head_dim) has queries, keys and values side by side.
Attend = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """The next tokens of one sequence; `ids` follow the positions that `kv` holds."""

    kv: Any  # from the runner's `new`
    ids: Sequence[int]
    wants_logits: bool  # of the last token
    wants_all_logits: bool = False  # of every token: one row each
    verifies: bool = False  # drafts: each token is computed with the bits of a step of its own
    positions: torch.Tensor | None = None  # (3, ids) of M-RoPE: time, row, column; None: text
    offset: int = 0  # added to the positions of text after images
    adapter: Any = None  # low_rank.Adapter that applies to these tokens
    # Image features (1 + deep, tokens, hidden) with the index of their first token in `ids`: the
    # first replace embeddings, the others are added after the first layers.
    features: Sequence[tuple[int, torch.Tensor]] = ()

    @property
    def num_logits(self) -> int:
        """The number of rows of logits that it wants."""
        return len(self.ids) if self.wants_all_logits else int(self.wants_logits)
