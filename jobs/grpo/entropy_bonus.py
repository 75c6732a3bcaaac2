"""The coefficient of the entropy bonus, which holds the entropy of the policy at a target.

Skywork-OR1 (He et al. 2025, arXiv:2505.22312): below the target the bonus applies and grows, above
it shrinks. Imports torch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class EntropyBonus:
    """The coefficient of a job, by the fields of a GRPOConfig; constant without a target.

    Its state: `coefficient`, and `latest`, the entropy of the latest step in nats per token.
    """

    def __init__(self, config: Any) -> None:
        self.coefficient: float = config.entropy_coef
        self.latest = math.inf
        self._config = config
        self._is_adaptive: bool = config.use_adaptive_entropy

    @property
    def is_on(self) -> bool:
        """Whether the loss has a bonus, in some steps at least."""
        return self._is_adaptive or self.coefficient != 0

    @property
    def applied(self) -> float:
        """The coefficient of the current step."""
        if self._is_adaptive and self.latest > self._config.entropy_target:
            return 0.0
        return self.coefficient

    def update(self, sums: Tensor) -> None:
        """Adapt the coefficient after a step; `sums` (2,): of entropies, and of their number."""
        if not self._is_adaptive:
            return
        self.latest = (sums[0] / sums[1].clamp(min=1.0)).item()
        change: float = self._config.entropy_coef_delta
        if self.latest <= self._config.entropy_target:
            self.coefficient = min(self.coefficient + change, self._config.entropy_coef_max)
        else:
            self.coefficient = max(self.coefficient - change, self._config.entropy_coef_min)


def entropy_sums(entropies: Tensor, mask: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the sum of the entropies of the tokens that the bonus acts on, and their number."""
    kept = mask if chosen is None else mask * chosen
    return torch.stack([(entropies * kept).sum(), kept.sum()]).detach()
