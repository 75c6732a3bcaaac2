"""From judged trajectories to what a step learns from: advantages, and the tensors of its loss.

The advantage of a completion is how much better it is than its group. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import compress, pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from ..keyed_numbers import permutation
from ..sequences.sequence import Sequence as Tokens
from .loss_options import NORMALIZE_FIRST
from .trajectories import Trajectory

TINY = 1e-4  # added to standard deviations
SAME = 1e-8  # rewards that differ by less are equal (torch.isclose with 0)


@dataclass(frozen=True)
class RewardWeights:
    """The weights of the rewards, and whether each is normalized before they are summed."""

    values: Sequence[float]
    are_for_normalized: bool = False

    @classmethod
    def of(cls, config: Any) -> RewardWeights:
        """Return the weights of a GRPOConfig."""
        is_first = config.multi_objective_aggregation == NORMALIZE_FIRST
        return cls(config.reward_weights, is_first)

    def rewards(self, scores: Tensor) -> Tensor:
        """Return the weighted sum of each completion's scores: (G, R) to (G,), NaN for no score."""
        return self.weighted(scores).nansum(1).masked_fill(scores.isnan().all(1), torch.nan)

    def has_spread(self, scores: Tensor) -> bool:
        """Whether rewards within a group differ, so that it has advantages other than 0."""
        if self.are_for_normalized:
            return any(_differ(column) for column in self.weighted(scores).unbind(1))
        return _differ(self.rewards(scores))

    def weighted(self, scores: Tensor) -> Tensor:
        """Return each score times the weight of its reward: (G, R)."""
        return scores * torch.tensor(self.values, device=scores.device)


class Advantages(NamedTuple):
    """Of B completions: `values` (B,), 0 for those without a score; `is_flat` (B,) bool, whether
    the rewards that they are normalized by are all equal."""

    values: Tensor
    is_flat: Tensor


def advantages(scores: Tensor, weights: RewardWeights, size: int, scale: str) -> Advantages:
    """Compute the advantages of groups of `size` completions.

    scores: (B, R) float32, NaN for none. `scale`: whether the rewards are divided by their standard
    deviation in the group, in the batch, or not ("group", "batch", "none").
    """
    if weights.are_for_normalized:
        return _of_normalized(scores, weights, size)
    rewards = weights.rewards(scores)
    groups = rewards.view(-1, size)
    means = torch.nanmean(groups, dim=1).repeat_interleave(size)
    if scale == "batch":
        deviations = standard_deviation(rewards).expand_as(rewards)
    else:
        deviations = standard_deviation(groups, 1).flatten().repeat_interleave(size)
    found = rewards - means
    if scale != "none":
        found = found / (deviations + TINY)
    return _without_nan(found, deviations)


def _of_normalized(scores: Tensor, weights: RewardWeights, size: int) -> Advantages:
    """Normalize each reward in its group, sum them, normalize the sums (GDPO, arXiv:2601.05242)."""
    grouped = scores.view(-1, size, scores.shape[1])
    normalized = grouped - torch.nanmean(grouped, dim=1, keepdim=True)
    normalized = normalized / (standard_deviation(grouped, 1) + TINY)
    rewards = weights.weighted(normalized.view(-1, scores.shape[1])).nansum(1)
    rewards = rewards.masked_fill(scores.isnan().all(1), torch.nan)
    deviations = standard_deviation(rewards).expand_as(rewards)
    return _without_nan((rewards - torch.nanmean(rewards)) / (deviations + TINY), deviations)


def _without_nan(found: Tensor, deviations: Tensor) -> Advantages:
    is_flat = torch.isclose(deviations, torch.zeros_like(deviations))
    return Advantages(torch.nan_to_num(found, nan=0.0), is_flat)


def standard_deviation(values: Tensor, dim: int | None = None) -> Tensor:
    """Return the standard deviation, with Bessel's correction, over what is not NaN.

    NaN where fewer than two values are known. With `dim`, that dimension has size 1 in the result.
    """
    mean = torch.nanmean(values, dim=dim, keepdim=dim is not None)
    count = torch.sum(~values.isnan(), dim=dim, keepdim=dim is not None)
    variance = torch.nanmean((values - mean) ** 2, dim=dim, keepdim=dim is not None)
    correction = torch.where(count > 1, count / (count - 1), torch.nan)
    return torch.sqrt(variance * correction)


def _differ(values: Tensor) -> bool:
    known = values[~values.isnan()]
    return len(known) > 1 and bool(known.max() - known.min() > SAME)


def completion_order(count: int, *, seed: int, step: int) -> list[int]:
    """Return the order in which the `count` completions that a step samples fill its micro-batches.

    `step`: the steps done before it. Groups are spread over the micro-batches, as in TRL.
    """
    return permutation(count, use="shuffle", seed=seed, step=step)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """B trajectories in the order of their micro-batches, with at most C tokens after a prompt.

    mask: (B, C) int64, 1 for the tokens with a loss. advantages: (B,). Log-probabilities in nats
    and entropies: (B, C) float32. `old`: by the policy at the first of several iterations;
    `sampled`: by the sampler, of int8 completions; `replayed`: by the policy that sampled them, of
    replayed completions only, which `is_replayed` (B,) bool marks. `contexts`: of each trajectory
    those after its first one, as [prompt, column of the first token that follows]; None: no
    trajectory has several.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    mask: Tensor
    advantages: Tensor
    entropies: Tensor
    reference: Tensor | None = None
    old: Tensor | None = None
    sampled: Tensor | None = None
    replayed: Tensor | None = None
    is_replayed: Tensor | None = None
    contexts: list[list[list[Any]]] | None = None

    @classmethod
    def of(
        cls,
        trajectories: Sequence[Trajectory],
        advantages: Tensor,
        *,
        hides_cut: bool,
        has_sampled: bool,
        device: torch.device,
    ) -> Self:
        """Make a batch, whose tokens with a loss are those that the model wrote.

        `hides_cut`: none of a trajectory that was cut. `has_sampled`: see `sampled`.
        """
        longest = max(len(one.ids) for one in trajectories)

        def padded(rows: Iterable[Sequence[float]]) -> Tensor:
            filled = [[*row, *[0.0] * (longest - len(row))] for row in rows]
            return torch.tensor(filled, dtype=torch.float32, device=device)

        learned = [[] if hides_cut and one.is_cut else one.is_written for one in trajectories]
        is_replayed = [one.is_replayed for one in trajectories]
        replayed = (one.logps if one.is_replayed else [] for one in trajectories)
        contexts = [[[c.prompt, c.begin] for c in one.contexts[1:]] for one in trajectories]
        return cls(
            prompts=[list(one.prompt.ids) for one in trajectories],
            completions=[one.ids for one in trajectories],
            mask=padded(learned).long(),
            advantages=advantages.to(device),
            entropies=padded(one.entropies for one in trajectories),
            sampled=padded(one.logps for one in trajectories) if has_sampled else None,
            replayed=padded(replayed) if any(is_replayed) else None,
            is_replayed=torch.tensor(is_replayed, device=device) if any(is_replayed) else None,
            contexts=contexts if any(contexts) else None,
        )

    @property
    def sequences(self) -> list[Tokens]:
        """The contexts that have tokens with a loss, in tables of C columns."""
        found = []
        further = self.contexts or [[]] * len(self.prompts)
        rows = zip(self.prompts, further, self.completions, self.mask.tolist(), strict=True)
        for row, (first, others, completion, mask) in enumerate(rows):
            begins = [(first, 0), *others, (None, len(completion))]
            for (prompt, begin), (_, end) in pairwise(begins):
                if any(mask[begin:end]):
                    size = len(prompt)
                    weights = (0.0,) * size + tuple(map(float, mask[begin:end]))
                    ids = (*prompt, *completion[begin:end])
                    found.append(Tokens(ids, weights, row, column=begin - size, shared=size))
        return found

    @property
    def is_learned(self) -> list[bool]:
        """Which completions have an advantage, of either sign, or are replayed."""
        found = self.advantages.ne(0)
        return (found if self.is_replayed is None else found | self.is_replayed).tolist()

    def rows(self, chosen: slice | Sequence[int]) -> Self:
        """Return some of the completions."""
        changes: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                numbers = range(len(value))[chosen] if isinstance(chosen, slice) else chosen
                changes[field.name] = [value[number] for number in numbers]
            elif value is not None:
                changes[field.name] = value[chosen]
        return replace(self, **changes)

    def state(self) -> dict[str, Any]:
        """Return the content for a checkpoint, as tensors and lists of numbers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def of_state(cls, state: Any, device: torch.device) -> Self:
        """Restore what `state` returned, also what earlier versions stored."""
        if isinstance(state, list):
            state = _of_former(state)
        known: dict[str, Any] = {}
        for field in fields(cls):
            value = state.get(field.name)
            known[field.name] = value.to(device) if isinstance(value, Tensor) else value
        return cls(**known)


def _of_former(batches: Sequence[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return the state of a batch that an earlier version stored as TRL's padded micro-batches."""

    def joined(name: str) -> Tensor | None:
        return torch.cat([batch[name] for batch in batches]) if name in batches[0] else None

    def tokens(part: str, mask: Tensor) -> list[list[int]]:
        ids = torch.cat([batch[f"{part}_ids"] for batch in batches])
        return [
            list(compress(row, kept)) for row, kept in zip(ids.tolist(), mask.tolist(), strict=True)
        ]

    prompt_mask = torch.cat([batch["prompt_mask"] for batch in batches])
    mask = torch.cat([batch["completion_mask"] for batch in batches])
    entropies = joined("entropies")
    return {
        "prompts": tokens("prompt", prompt_mask),
        "completions": tokens("completion", mask),
        "mask": mask,
        "advantages": joined("advantages"),
        "entropies": torch.zeros(mask.shape) if entropies is None else entropies,
        "reference": joined("ref_per_token_logps"),
        "old": joined("old_per_token_logps"),
        "sampled": joined("sampling_per_token_logps"),
        "replayed": joined("replayed_logps"),
        "is_replayed": joined("is_replayed"),
    }
