"""Advantages: how much better each completion of a group is than the others. Imports torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .reward_weights import RewardWeights

TINY = 1e-4  # added to standard deviations


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
