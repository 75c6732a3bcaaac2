"""What a forward pass computes: the next positions of each sequence, and how they attend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Of one layer: what its rows see, (rows, heads, size), from their queries, keys and values, side by
# side in (rows, heads + 2 key heads, size), and the number of the layer.
Attend = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Part:
    """The next positions of one sequence: `ids` follow what `kv` holds."""

    kv: Any  # what the runner's `new` made
    ids: Sequence[int]
    wants_logits: bool
    # Of sequences with pictures: where the positions are, and the rows that stand for pictures.
    places: torch.Tensor | None = None  # (3, ids): time, row, column
    offset: int = 0  # of the position of ids that have no places
    # The first of the ids, and (1 + deep, rows, hidden): the features in the place of embeddings,
    # and those that are added behind the first layers.
    seen: Sequence[tuple[int, torch.Tensor]] = ()
