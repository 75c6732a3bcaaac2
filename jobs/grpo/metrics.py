"""The metrics of a GRPO step, by TRL's names, for its event and the trackers. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..losses.grpo import Objective, Terms, Tokens
from .batch import RewardWeights, standard_deviation
from .trajectories import Trajectory

DRIFT = "sampling/sampling_logp_difference/mean"  # in nats
CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")  # losses that report clipped ratios


def of_lengths(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the metrics of what the model wrote, in tokens."""
    lengths = torch.tensor([float(sum(one.is_written)) for one in trajectories])
    is_cut = torch.tensor([one.is_cut for one in trajectories])
    ended = lengths[~is_cut] if not bool(is_cut.all()) else torch.zeros(1)
    found = {"completions/clipped_ratio": float(is_cut.float().mean())}
    for kind, counts in (("", lengths), ("terminated_", ended)):
        found[f"completions/mean_{kind}length"] = float(counts.mean())
        found[f"completions/min_{kind}length"] = float(counts.min())
        found[f"completions/max_{kind}length"] = float(counts.max())
    return found


def of_rewards(
    scores: Tensor, names: Sequence[str], weights: RewardWeights, is_flat: Tensor
) -> dict[str, float]:
    """Return the metrics of the scores (B, R) of rewards with these names.

    is_flat: (B,), see Advantages.
    """
    rewards = weights.rewards(scores)
    metrics = {}
    for name, column in zip(names, scores.unbind(1), strict=True):
        metrics[f"rewards/{name}/mean"] = float(torch.nanmean(column))
        metrics[f"rewards/{name}/std"] = float(standard_deviation(column))
    return metrics | {
        "reward": float(torch.nanmean(rewards)),
        "reward_std": float(standard_deviation(rewards)),
        "frac_reward_zero_std": float(is_flat.float().mean()),
    }


def of_logged(logged: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the means of what rewards have logged."""
    return {name: sum(values) / len(values) for name, values in logged.items()}


def of_loss(tokens: Tokens, terms: Terms, at: Objective) -> dict[str, float]:
    """Return the metrics of a micro-batch, from the loss of all its tokens."""
    mask = tokens.mask
    found = {"entropy": _mean(tokens.entropies, mask)}
    if terms.kl is not None:
        found["kl"] = _mean(terms.kl, mask)
    advantages = tokens.columns
    if at.loss_type in CLIPPED:
        is_low = (terms.ratios < 1 - at.epsilon) & (advantages < 0)
        is_high = (terms.ratios > 1 + at.epsilon_high) & (advantages > 0)
        lows, highs = _means_of_rows(is_low, mask), _means_of_rows(is_high, mask)
        found |= {
            "clip_ratio/low_mean": _mean(is_low.float(), mask),
            "clip_ratio/high_mean": _mean(is_high.float(), mask),
            "clip_ratio/region_mean": _mean((is_low | is_high).float(), mask),
            "clip_ratio/low_min": min(lows, default=math.nan),
            "clip_ratio/high_max": max(highs, default=math.nan),
        }
    elif at.loss_type == "cispo":
        is_clipped = (terms.ratios > at.epsilon_high) & (advantages > 0)
        found["cispo_clip_ratio"] = _mean(is_clipped.float(), mask)
    elif terms.weights is not None:
        found["vespo/phi_seq_mean"] = _mean(terms.weights, mask)
    return found


def drift(tokens: Tokens, is_known: Tensor | None) -> float:
    """Return the mean distance of the sampler's log-probabilities from the policy's, in nats.

    `is_known`: the completions (B,) that have log-probabilities of the policy; None: all.
    """
    assert tokens.sampler is not None
    mask = tokens.mask.bool()
    if is_known is not None:
        mask = mask & is_known[:, None]
    found = (tokens.of_old - tokens.sampler)[mask].abs()
    return float(found.mean()) if len(found) else 0.0


def averaged(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over micro-batches, without those where it is NaN."""
    means = {}
    for name in dict.fromkeys(name for one in found for name in one):
        values = [one[name] for one in found if not math.isnan(one.get(name, math.nan))]
        if values:
            means[name] = sum(values) / len(values)
    return means


def _mean(values: Tensor, mask: Tensor) -> float:
    """Return the mean over the tokens with a loss; of (B, 1), over the completions."""
    if values.shape[1] == 1:
        return float(values.sum() / torch.tensor(float(len(values))).clamp(min=1.0))
    return float((values * mask).sum() / mask.sum().float().clamp(min=1.0))


def _means_of_rows(is_clipped: Tensor, mask: Tensor) -> list[float]:
    """Return the share of clipped tokens of each completion with a loss."""
    if is_clipped.shape[1] == 1:
        shares = is_clipped.float()[:, 0]
    else:
        shares = (is_clipped * mask).sum(-1) / mask.sum(-1)
    return [share for share in shares.tolist() if not math.isnan(share)]
