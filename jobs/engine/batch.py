"""Per-token inputs of a batch of parts: positions, adapters, image features, wanted logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .low_rank import Adapted, Adapter
from .parts import Part


def positions_of(parts: Sequence[Part]) -> torch.Tensor:
    """Return the positions of all tokens: (tokens,), or (3, tokens) if a part uses M-RoPE."""
    if all(part.positions is None for part in parts):
        begins = [(part.kv.length + part.offset, len(part.ids)) for part in parts]
        line = [place for begin, count in begins for place in range(begin, begin + count)]
        return torch.tensor(line)
    columns = []
    for part in parts:
        begin = part.kv.length + part.offset
        line_of_part = torch.arange(begin, begin + len(part.ids)).expand(3, -1)
        columns.append(line_of_part if part.positions is None else part.positions)
    return torch.cat(columns, dim=1)


def wanted_rows(parts: Sequence[Part]) -> list[int]:
    """Return the indices of tokens whose logits are wanted."""
    wanted: list[int] = []
    row = 0
    for part in parts:
        row += len(part.ids)
        wanted += range(row - part.num_logits, row)
    return wanted


def adapted_rows(parts: Sequence[Part]) -> list[Adapted]:
    """Return the adapters of a batch, each with the indices of its tokens.

    All tokens are a slice where the bits of a token may depend on the batch, which is faster.
    """
    rows: dict[int, list[int]] = {}
    adapters: dict[int, Adapter] = {}
    begin = 0
    for part in parts:
        end = begin + len(part.ids)
        if part.adapter is not None:
            adapters[part.adapter.number] = part.adapter
            rows.setdefault(part.adapter.number, []).extend(range(begin, end))
        begin = end
    if len(adapters) == 1:
        ((number, adapter),) = adapters.items()
        if len(rows[number]) == begin and not adapter.is_batch_invariant:
            return [Adapted(adapter)]
    return [Adapted(adapters[number], torch.tensor(found)) for number, found in rows.items()]


def image_features(parts: Sequence[Part]) -> list[tuple[slice, torch.Tensor]]:
    """Return image features, each with its slice of the batch's tokens."""
    found, row = [], 0
    for part in parts:
        for first, features in part.features:
            begin = row + first
            found.append((slice(begin, begin + features.shape[1]), features))
        row += len(part.ids)
    return found
