"""Packs with shared prompts: a group of completions in one sequence, without padding.

A pack holds a prompt once, then its completions one after another, each with positions that follow
the prompt. Linear layers compute N tokens where a padded batch has B x (P + C); the attention
function restricts each completion to the prompt and itself. Imports torch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..context import ONE_PROCESS, Ranks
from .attention import causal

# How results differ since RULES 1, for the warning of a job that is resumed.
FIXED = "every completion of one token is learned (some that share their prompt were left out)"


@dataclass(frozen=True)
class Sample:
    """A prompt with one completion. `index` is its row in the batch."""

    index: int
    prompt: tuple[int, ...]
    completion: tuple[int, ...]

    @property
    def num_inputs(self) -> int:
        """Completion tokens that are model inputs: all but the last one."""
        return max(len(self.completion) - 1, 0)


class Pack:
    """Samples packed into one sequence of N tokens, grouped by prompt.

    ids, positions: (1, N) int64. For the K completion tokens, (K,) int64 each: predictors, the
    position in the pack whose logits predict the token; targets, the token; rows, columns, its
    place in the (B, C) batch of completions. Raises ValueError for an empty prompt: nothing would
    predict the first token of its completions.
    """

    def __init__(self, rows: Sequence[Sample], device: torch.device | str = "cpu") -> None:
        groups: dict[tuple[int, ...], list[Sample]] = {}
        for row in rows:
            groups.setdefault(row.prompt, []).append(row)
        if () in groups:
            raise ValueError(f"sample {groups[()][0].index} has an empty prompt")
        ids: list[int] = []
        positions: list[int] = []
        scored: list[tuple[int, int, int, int]] = []
        self._groups: list[_Group] = []
        for prompt, members in groups.items():
            start, end = len(ids), len(ids) + len(prompt)
            self._groups.append(_Group(start, end, [row.num_inputs for row in members], device))
            ids += prompt
            positions += range(len(prompt))
            for row in members:
                first = len(ids)
                for column, token in enumerate(row.completion):
                    place = first + column - 1 if column else end - 1
                    scored.append((place, token, row.index, column))
                ids += row.completion[: row.num_inputs]
                positions += range(len(prompt), len(prompt) + row.num_inputs)
        self.ids = torch.tensor([ids], device=device)
        self.positions = torch.tensor([positions], device=device)
        table = torch.tensor(scored, dtype=torch.int64, device=device).view(-1, 4)
        self.predictors, self.targets, self.rows, self.columns = table.unbind(1)

    @property
    def ends(self) -> list[int]:
        """The place of the last token of each prompt, in the order of the groups."""
        return [group.end - 1 for group in self._groups]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return the causal attention of every token within its own sequence."""
        seen = [group.attend(query, key, value, scale) for group in self._groups]
        return torch.cat([part for parts in seen for part in parts])[None]


class _Group:
    """A prompt from start to end, followed by its completions of `sizes` tokens."""

    def __init__(self, start: int, end: int, sizes: list[int], device: torch.device | str) -> None:
        self.start, self.end = start, end
        self.sizes = sizes
        self.total, self.longest = sum(sizes), max(sizes)
        self._masks: dict[int, Tensor] = {}  # by the number of query heads per key head
        self._spread: Tensor | None = None  # (G, C): index of padded token c of completion g
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
        """Return the attention of the prompt and of the completions: (tokens, heads, D) each."""
        parts = [causal(query, key, value, slice(self.start, self.end), scale)]
        if self.total:
            parts.append(self._completions(query, key, value, scale))
        return parts

    def _completions(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        group, length = len(self.sizes), self.longest
        heads, key_heads, size = query.shape[1], key.shape[1], query.shape[3]
        shared = heads // key_heads
        # Grouped-query attention without copies of keys and values: the query heads of a key head
        # become more queries on it.
        own = self._padded(query).view(group, length, key_heads, shared, size)
        own = own.permute(0, 2, 3, 1, 4).reshape(group, key_heads, shared * length, size)
        seen = F.scaled_dot_product_attention(
            own,
            self._with_prompt(key),
            self._with_prompt(value),
            attn_mask=self._mask(shared, own),
            scale=scale,
        )
        seen = seen.view(group, key_heads, shared, length, size).permute(0, 3, 1, 2, 4)
        flat = seen.reshape(group * length, heads, size)
        return flat if self._gather is None else flat[self._gather]

    def _padded(self, states: Tensor) -> Tensor:
        """Gather the completions' states from (1, heads, N, D): (G, C, heads, D)."""
        own = states[0, :, self.end : self.end + self.total].transpose(0, 1)
        if self._spread is None:
            return own.reshape(len(self.sizes), self.longest, *own.shape[1:])
        return own[self._spread]

    def _with_prompt(self, states: Tensor) -> Tensor:
        """Prepend the prompt's states to those of each completion: (G, heads, P + C, D)."""
        prompt = states[:, :, self.start : self.end].expand(len(self.sizes), -1, -1, -1)
        return torch.cat([prompt, self._padded(states).transpose(1, 2)], dim=2)

    def _mask(self, shared: int, like: Tensor) -> Tensor:
        """The mask of a completion token: all prompt tokens, and its completion up to itself."""
        if shared not in self._masks:
            prompt, length = self.end - self.start, self.longest
            later = torch.ones((length, prompt + length), dtype=torch.bool, device=like.device)
            mask = like.new_zeros(later.shape).masked_fill_(later.triu_(prompt + 1), -torch.inf)
            self._masks[shared] = mask.repeat(shared, 1)
        return self._masks[shared]


def split(
    groups: Iterable[tuple[Sample, ...]], most_tokens: int, ranks: Ranks = ONE_PROCESS
) -> list[list[Sample]]:
    """Divide samples into packs of at most `most_tokens`, or of one group; groups stay together.

    Returns the packs of this rank: those of a share of the groups, with about as many tokens on
    each rank. The packs do not depend on the order of the groups, so that equal policy and
    reference weights give a KL of exactly 0.
    """
    packs: list[list[Sample]] = []
    prompts: set[tuple[int, ...]] = set()  # of the last pack
    tokens = 0  # of the last pack
    for group in _share(sorted(groups, key=_order), ranks):
        added = _num_tokens(group, prompts)
        if not packs or tokens + added > most_tokens:
            packs.append([])
            prompts, tokens = set(), 0
            added = _num_tokens(group, prompts)
        packs[-1] += group
        prompts |= {sample.prompt for sample in group}
        tokens += added
    return packs


def _share(groups: Sequence[tuple[Sample, ...]], ranks: Ranks) -> Sequence[tuple[Sample, ...]]:
    """Return a rank's run of the groups: neighbors, which may have the same prompt.

    The runs are slices between common bounds, so that each group is in exactly one of them,
    also a group that adds no tokens. The tokens only decide where the bounds are.
    """
    prompts = set[tuple[int, ...]]()
    middles, total = [], 0.0  # in tokens, of each group
    for group in groups:
        size = _num_tokens(group, prompts)
        middles.append(total + size / 2)
        prompts |= {sample.prompt for sample in group}
        total += size
    places = [middle / total * ranks.size if total else 0.0 for middle in middles]
    inner = [bisect_left(places, rank) for rank in range(1, ranks.size)]
    bounds = [0, *inner, len(groups)]
    return groups[bounds[ranks.rank] : bounds[ranks.rank + 1]]


def _order(group: tuple[Sample, ...]) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    return tuple((sample.prompt, sample.completion) for sample in group)


def _num_tokens(group: tuple[Sample, ...], prompts: set[tuple[int, ...]]) -> int:
    """Return how many tokens a group adds to a pack that has these prompts."""
    new = {sample.prompt for sample in group} - prompts
    return sum(map(len, new)) + sum(sample.num_inputs for sample in group)
