"""Losses of direct preference optimization and its relatives, over pairs of completions.

With log-probabilities summed over the tokens of a completion, by policy and reference:

    c = log pi(chosen) - log pi_ref(chosen)      r = the same for the rejected completion
    d = c - r                                    s(x) = sigmoid(x)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Pairs:
    """B pairs: log-probabilities of completions in nats, (B,) float32; lengths, (B,) int64."""

    chosen: Tensor
    rejected: Tensor
    reference_chosen: Tensor
    reference_rejected: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor

    @property
    def chosen_ratios(self) -> Tensor:
        """Log-ratios of the chosen completions: c."""
        return self.chosen - self.reference_chosen

    @property
    def rejected_ratios(self) -> Tensor:
        """Log-ratios of the rejected completions: r."""
        return self.rejected - self.reference_rejected

    @property
    def margins(self) -> Tensor:
        """Differences of the log-ratios: d."""
        return self.chosen_ratios - self.rejected_ratios

    @property
    def margins_per_token(self) -> Tensor:
        """c and r divided by the number of tokens, then their difference."""
        chosen = self.chosen_ratios / self.chosen_tokens.clamp(min=1.0)
        return chosen - self.rejected_ratios / self.rejected_tokens.clamp(min=1.0)


@dataclass(frozen=True, kw_only=True)
class Strength:
    """The parameters of the losses."""

    beta: float
    label_smoothing: float = 0.0  # probability that a label is wrong
    discopop_tau: float = 0.05  # temperature of the blend of discopop


def dpo_loss(name: str, pairs: Pairs, strength: Strength) -> Tensor:
    """Return the loss of pairs, the mean over them: a differentiable tensor of one element."""
    return LOSSES[name](pairs, strength).mean()


def _sigmoid(pairs: Pairs, at: Strength) -> Tensor:
    """-log s(beta d): Rafailov et al. 2023, arXiv:2305.18290."""
    return -F.logsigmoid(at.beta * pairs.margins)


def _hinge(pairs: Pairs, at: Strength) -> Tensor:
    """max(0, 1 - beta d): SLiC, Zhao et al. 2023, arXiv:2305.10425."""
    return torch.relu(1 - at.beta * pairs.margins)


def _ipo(pairs: Pairs, at: Strength) -> Tensor:
    """(d per token - 1 / 2 beta)^2: Azar et al. 2023, arXiv:2310.12036, eq. 17 (tau: beta)."""
    return (pairs.margins_per_token - 1 / (2 * at.beta)) ** 2


def _exo_pair(pairs: Pairs, at: Strength) -> Tensor:
    """KL of (s(beta d), s(-beta d)) to (1 - e, e): Ji et al. 2024, arXiv:2402.00856, eq. 16."""
    scaled = at.beta * pairs.margins
    epsilon = torch.tensor(at.label_smoothing, device=scaled.device)
    won = torch.sigmoid(scaled) * (F.logsigmoid(scaled) - torch.log1p(-epsilon))
    lost = torch.sigmoid(-at.beta * pairs.margins) * (
        F.logsigmoid(-at.beta * pairs.margins) - torch.log(epsilon)
    )
    return won + lost


def _nca_pair(pairs: Pairs, at: Strength) -> Tensor:
    """-log s(beta c) - (log s(-beta c) + log s(-beta r)) / 2: Chen et al., arXiv:2402.05369."""
    chosen, rejected = at.beta * pairs.chosen_ratios, at.beta * pairs.rejected_ratios
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _robust(pairs: Pairs, at: Strength) -> Tensor:
    """The unbiased loss under flipped labels: Chowdhury et al. 2024, arXiv:2403.00409."""
    clean = -(1 - at.label_smoothing) * F.logsigmoid(at.beta * pairs.margins)
    flipped = -at.label_smoothing * F.logsigmoid(-at.beta * pairs.margins)
    return (clean - flipped) / (1 - 2 * at.label_smoothing)


def _bco_pair(pairs: Pairs, at: Strength) -> Tensor:
    """-log s(beta c) - log s(-beta r): Jung et al. 2024, arXiv:2404.04656, without the shift."""
    chosen, rejected = at.beta * pairs.chosen_ratios, at.beta * pairs.rejected_ratios
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def _sppo_hard(pairs: Pairs, at: Strength) -> Tensor:
    """(c - 1 / 2 beta)^2 + (r + 1 / 2 beta)^2: Wu et al. 2024, arXiv:2405.00675, eq. 4.7."""
    won = (pairs.chosen_ratios - 0.5 / at.beta) ** 2
    return won + (pairs.rejected_ratios + 0.5 / at.beta) ** 2


def _smoothed(margins: Tensor, at: Strength) -> Tensor:
    sure = -F.logsigmoid(at.beta * margins) * (1 - at.label_smoothing)
    return sure - F.logsigmoid(-at.beta * margins) * at.label_smoothing


def _aot(pairs: Pairs, at: Strength) -> Tensor:
    """The sigmoid loss of the sorted margins of both models: Melnyk et al., arXiv:2406.05882."""
    policy, _ = torch.sort(pairs.chosen - pairs.rejected, dim=0)
    reference, _ = torch.sort(pairs.reference_chosen - pairs.reference_rejected, dim=0)
    return _smoothed(policy - reference, at)


def _aot_unpaired(pairs: Pairs, at: Strength) -> Tensor:
    """The sigmoid loss of sorted c and sorted r: Melnyk et al. 2024, arXiv:2406.05882."""
    chosen, _ = torch.sort(pairs.chosen_ratios, dim=0)
    rejected, _ = torch.sort(pairs.rejected_ratios, dim=0)
    return _smoothed(chosen - rejected, at)


def _apo_zero(pairs: Pairs, at: Strength) -> Tensor:
    """1 - s(beta c) + s(beta r): D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 7."""
    chosen = 1 - torch.sigmoid(at.beta * pairs.chosen_ratios)
    return chosen + torch.sigmoid(at.beta * pairs.rejected_ratios)


def _apo_down(pairs: Pairs, at: Strength) -> Tensor:
    """s(beta c) + 1 - s(beta d): D'Oosterlinck et al. 2024, arXiv:2408.06266, eq. 8."""
    chosen = torch.sigmoid(at.beta * pairs.chosen_ratios)
    return chosen + (1 - torch.sigmoid(at.beta * pairs.margins))


def _discopop(pairs: Pairs, at: Strength) -> Tensor:
    """A blend of -log s(x) and exp(-x), x = beta d: Lu et al. 2024, arXiv:2406.08414, eq. 5."""
    scaled = pairs.margins * at.beta
    blend = torch.sigmoid(scaled / at.discopop_tau)
    return -F.logsigmoid(scaled) * (1 - blend) + torch.exp(-scaled) * blend


def _sigmoid_norm(pairs: Pairs, at: Strength) -> Tensor:
    """-log s(beta d per token): Lambert et al. 2024 (Tulu 3), arXiv:2411.15124."""
    return -F.logsigmoid(at.beta * pairs.margins_per_token)


LOSSES: Mapping[str, Callable[[Pairs, Strength], Tensor]] = {
    "sigmoid": _sigmoid,
    "hinge": _hinge,
    "ipo": _ipo,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "robust": _robust,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "aot": _aot,
    "aot_unpaired": _aot_unpaired,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "sigmoid_norm": _sigmoid_norm,
}
SORTING = ("aot", "aot_unpaired")  # losses in which the pairs of a batch depend on each other
