"""The weights of the rewards of a job. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .loss_options import NORMALIZE_FIRST

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


def _differ(values: Tensor) -> bool:
    known = values[~values.isnan()]
    return len(known) > 1 and bool(known.max() - known.min() > SAME)
