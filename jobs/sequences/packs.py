"""Packs: sequences in one row of tokens without padding, first tokens that they share only once.

A pack holds a shared head once, then its tails one after another, each with positions that follow
the head. Linear layers compute N tokens where a padded batch has B x (P + C); the attention
function restricts each tail to the head and itself. Imports torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..context import ONE_PROCESS, Ranks
from .attention import causal
from .sequence import Sequence

# How results differ since RULES 1, for the warning of a job that is resumed.
FIXED = "every completion of one token is learned (some that share their prompt were left out)"


class Pack:
    """Sequences in one row of N tokens, grouped by the tokens that they share.

    ids, positions: (1, N) int64. For the K tokens with a weight, (K,) each: predictors, the place
    in the pack whose output predicts the token; targets, the token; rows, columns, its place in
    tables of the batch, int64; weights, float32. Raises ValueError for a first token with a weight.
    """

    def __init__(self, sequences: Iterable[Sequence], device: torch.device | str = "cpu") -> None:
        groups: dict[Any, list[Sequence]] = {}
        for number, one in enumerate(sequences):
            groups.setdefault(one.head or number, []).append(one)
        ids: list[int] = []
        positions: list[int] = []
        scored: list[tuple[int, int, int, int]] = []
        weights: list[float] = []
        self._groups: list[_Group] = []
        for members in groups.values():
            # Sequences that share nothing are blocks of their own.
            is_shared = bool(members[0].head)
            head = members[0].head or members[0].tail
            start, end = len(ids), len(ids) + len(head)
            tails = [one.tail if is_shared else () for one in members]
            self._groups.append(_Group(start, end, list(map(len, tails)), device))
            ids += head
            positions += range(len(head))
            for one, tail in zip(members, tails, strict=True):
                # The place of token t of a tail is behind + t.
                behind = len(ids) - len(head)
                for t in one.scored:
                    if t == 0:
                        raise ValueError(f"row {one.row}: nothing predicts the first token")
                    place = t - 1 + (start if t <= len(head) else behind)
                    scored.append((place, one.tokens[t], one.row, one.column + t))
                    weights.append(one.weights[t])
                ids += tail
                positions += range(len(head), len(head) + len(tail))
        self.ids = torch.tensor([ids], device=device)
        self.positions = torch.tensor([positions], device=device)
        table = torch.tensor(scored, dtype=torch.int64, device=device).view(-1, 4)
        self.predictors, self.targets, self.rows, self.columns = table.unbind(1)
        self.weights = torch.tensor(weights, dtype=torch.float32, device=device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the causal attention of every token within its own sequence."""
        seen = [group.attend(query, key, value, scale) for group in self._groups]
        return torch.cat([part for parts in seen for part in parts])[None]


class _Group:
    """A head from start to end, followed by its tails of `sizes` tokens."""

    def __init__(self, start: int, end: int, sizes: list[int], device: torch.device | str) -> None:
        self.start, self.end = start, end
        self.sizes = sizes
        self.total, self.longest = sum(sizes), max(sizes)
        self._masks: dict[int, Tensor] = {}  # by the number of query heads per key head
        self._spread: Tensor | None = None  # (G, C): index of padded token c of tail g
        self._gather: Tensor | None = None  # (total,): index of each token among the padded ones
        if min(sizes) < self.longest:
            starts = torch.tensor([0, *sizes[:-1]], device=device).cumsum(0)[:, None]
            lengths = torch.tensor(sizes, device=device)[:, None]
            steps = torch.arange(self.longest, device=device)[None]
            # Padding repeats an existing token: only padding attends to it.
            self._spread = starts + steps.clamp(max=lengths - 1).clamp_(min=0)
            self._spread.clamp_(max=self.total - 1)
            self._gather = (steps < lengths).flatten().nonzero()[:, 0]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> list[Tensor]:
        """Return the attention of the head and of the tails: (tokens, heads, D) each."""
        parts = [causal(query, key, value, slice(self.start, self.end), scale)]
        if self.total:
            parts.append(self._tails(query, key, value, scale))
        return parts

    def _tails(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        group, length = len(self.sizes), self.longest
        heads, key_heads, size = query.shape[1], key.shape[1], query.shape[3]
        shared = heads // key_heads
        # Grouped-query attention without copies of keys and values: the query heads of a key head
        # become more queries on it.
        own = self._padded(query).view(group, length, key_heads, shared, size)
        own = own.permute(0, 2, 3, 1, 4).reshape(group, key_heads, shared * length, size)
        seen = F.scaled_dot_product_attention(
            own,
            self._with_head(key),
            self._with_head(value),
            attn_mask=self._mask(shared, own),
            scale=scale,
        )
        seen = seen.view(group, key_heads, shared, length, size).permute(0, 3, 1, 2, 4)
        flat = seen.reshape(group * length, heads, size)
        return flat if self._gather is None else flat[self._gather]

    def _padded(self, states: Tensor) -> Tensor:
        """Gather the tails' states from (1, heads, N, D): (G, C, heads, D)."""
        own = states[0, :, self.end : self.end + self.total].transpose(0, 1)
        if self._spread is None:
            return own.reshape(len(self.sizes), self.longest, *own.shape[1:])
        return own[self._spread]

    def _with_head(self, states: Tensor) -> Tensor:
        """Prepend the head's states to those of each tail: (G, heads, P + C, D)."""
        head = states[:, :, self.start : self.end].expand(len(self.sizes), -1, -1, -1)
        return torch.cat([head, self._padded(states).transpose(1, 2)], dim=2)

    def _mask(self, shared: int, like: Tensor) -> Tensor:
        """The mask of a token of a tail: all of the head, and its tail up to itself."""
        if shared not in self._masks:
            head, length = self.end - self.start, self.longest
            later = torch.ones((length, head + length), dtype=torch.bool, device=like.device)
            mask = like.new_zeros(later.shape).masked_fill_(later.triu_(head + 1), -torch.inf)
            self._masks[shared] = mask.repeat(shared, 1)
        return self._masks[shared]


def split(
    groups: Iterable[tuple[Sequence, ...]], most_tokens: int, ranks: Ranks = ONE_PROCESS
) -> list[list[Sequence]]:
    """Divide sequences into packs of at most `most_tokens`, or of one group; groups stay together.

    Returns the packs of this rank: those of a share of the groups, with about as many tokens on
    each rank. The packs do not depend on the order of the groups, so that equal policy and
    reference weights give a KL of exactly 0.
    """
    ordered = sorted(groups, key=_order)
    if not any(one.shared for group in ordered for one in group):
        return _first_fit(ordered, most_tokens, ranks)
    packs: list[list[Sequence]] = []
    heads: set[tuple[int, ...]] = set()  # of the last pack
    tokens = 0  # of the last pack
    for group in _share(ordered, ranks):
        added = _num_tokens(group, heads)
        if not packs or tokens + added > most_tokens:
            packs.append([])
            heads, tokens = set(), 0
            added = _num_tokens(group, heads)
        packs[-1] += group
        heads |= {one.head for one in group}
        tokens += added
    return packs


def _first_fit(
    groups: list[tuple[Sequence, ...]], most_tokens: int, ranks: Ranks
) -> list[list[Sequence]]:
    """Divide groups that share nothing, the longest first, to the rank with the fewest tokens."""
    packs: list[list[Sequence]] = []
    room: list[int] = []  # in each pack
    loads = [0] * ranks.size
    for group in sorted(groups, key=lambda group: -_num_tokens(group, set())):
        size = _num_tokens(group, set())
        rank = loads.index(min(loads))
        loads[rank] += size
        if rank != ranks.rank:
            continue
        fitting = next((i for i, left in enumerate(room) if left >= size), None)
        if fitting is None:
            fitting = len(packs)
            packs.append([])
            room.append(most_tokens)
        packs[fitting] += group
        room[fitting] -= size
    return packs


def _share(groups: list[tuple[Sequence, ...]], ranks: Ranks) -> list[tuple[Sequence, ...]]:
    """Return a rank's run of the groups: neighbors, which may have the same head.

    The runs are slices between common bounds, so that each group is in exactly one of them,
    also a group that adds no tokens. The tokens only decide where the bounds are.
    """
    heads = set[tuple[int, ...]]()
    middles, total = [], 0.0  # in tokens, of each group
    for group in groups:
        size = _num_tokens(group, heads)
        middles.append(total + size / 2)
        heads |= {one.head for one in group}
        total += size
    places = [middle / total * ranks.size if total else 0.0 for middle in middles]
    inner = [bisect_left(places, rank) for rank in range(1, ranks.size)]
    bounds = [0, *inner, len(groups)]
    return groups[bounds[ranks.rank] : bounds[ranks.rank + 1]]


def _order(group: tuple[Sequence, ...]) -> list[Any]:
    kept = [(one, one.num_inputs + 1) for one in group]
    return [
        (one.tokens[: one.shared], one.tokens[one.shared : end], one.weights[:end])
        for one, end in kept
    ]


def _num_tokens(group: tuple[Sequence, ...], heads: set[tuple[int, ...]]) -> int:
    """Return how many tokens a group adds to a pack that has these heads."""
    new = {one.head for one in group} - heads
    return sum(map(len, new)) + sum(len(one.tail) for one in group)
