"""From the scores of rewards to advantages: how much better a completion is than its group.

Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .loss_options import NORMALIZE_FIRST

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
