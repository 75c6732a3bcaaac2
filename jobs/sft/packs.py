"""Packs of rows: several rows in one sequence, each attending only to itself. Imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..context import ONE_PROCESS, Ranks
from ..sequences.attention import causal
from .dataset import IGNORED, Example


@dataclass(frozen=True)
class Tokens:
    """The tokens of a row and its labels (IGNORED: no loss), up to the last one with a loss."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


class SequencePack:
    """Rows in one sequence of N tokens; `jobs.sequences.passes.Pack`.

    The last token of a row is left out: it predicts nothing.
    """

    def __init__(self, rows: Sequence[Tokens], device: torch.device | str = "cpu") -> None:
        ids: list[int] = []
        positions: list[int] = []
        predictors: list[int] = []
        targets: list[int] = []
        self._rows: list[slice] = []
        for row in rows:
            start, count = len(ids), len(row.ids) - 1
            self._rows.append(slice(start, start + count))
            ids += row.ids[:-1]
            positions += range(count)
            learned = [place for place in range(count) if row.labels[place + 1] != IGNORED]
            predictors += [start + place for place in learned]
            targets += [row.labels[place + 1] for place in learned]
        self.ids = torch.tensor([ids], device=device)
        self.positions = torch.tensor([positions], device=device)
        self.predictors = torch.tensor(predictors, dtype=torch.int64, device=device)
        self.targets = torch.tensor(targets, dtype=torch.int64, device=device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the attention mask: each token attends to its row up to itself."""
        return torch.cat([causal(query, key, value, row, scale) for row in self._rows])[None]


def trimmed(rows: Iterable[Example]) -> list[Tokens]:
    """Return the rows that have a token to learn, up to the last one: nothing depends on others."""
    found = []
    for row in rows:
        end = max((i for i, label in enumerate(row.labels) if label != IGNORED), default=0) + 1
        if end > 1:
            found.append(Tokens(tuple(row.ids[:end]), tuple(row.labels[:end])))
    return found


def split(
    rows: Iterable[Tokens], most_tokens: int, ranks: Ranks = ONE_PROCESS
) -> list[list[Tokens]]:
    """Divide rows into packs of at most `most_tokens`, or of one row (first fit, longest first).

    Returns the packs of this rank: each row goes to the rank with the fewest tokens so far. The
    packs do not depend on the order of the rows.
    """
    packs: list[list[Tokens]] = []
    room: list[int] = []  # in each pack
    loads = [0] * ranks.size
    for row in sorted(rows, key=lambda row: (-len(row.ids), row.ids, row.labels)):
        size = len(row.ids) - 1
        rank = loads.index(min(loads))
        loads[rank] += size
        if rank != ranks.rank:
            continue
        fitting = next((i for i, left in enumerate(room) if left >= size), None)
        if fitting is None:
            fitting = len(packs)
            packs.append([])
            room.append(most_tokens)
        packs[fitting].append(row)
        room[fitting] -= size
    return packs
