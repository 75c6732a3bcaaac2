"""Losses of group relative policy optimization and its relatives, over tokens of completions.

GRPO: Shao et al. 2024, arXiv:2402.03300. With the advantage A of a completion, the probability p of
a token by the policy, and p_old, p_ref by the policy that sampled it and by the reference:

    r = p / p_old                            ratio of a token
    k = p_ref / p - log(p_ref / p) - 1       KL term of a token (Schulman 2020), weighted by beta

The loss of a completion is summed over its tokens with a loss, and normalized as `LOSSES` says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """The tokens of B completions, padded to C columns, and their log-probabilities in nats.

    (B, C) float32 unless said otherwise. Only `logps` and, for a bonus, `entropies` have gradients.
    """

    logps: Tensor  # by the policy
    entropies: Tensor  # of its distributions
    mask: Tensor  # (B, C) int64: 1 for the tokens with a loss
    advantages: Tensor  # (B,), or (B, C) where importance weights of tokens are multiplied into it
    old: Tensor | None = None  # by the policy that sampled; None: as `logps`
    sampler: Tensor | None = None  # by the sampler, where it rounds otherwise; None: as `old`
    reference: Tensor | None = None  # needed with beta

    @property
    def of_old(self) -> Tensor:
        """The log-probabilities by the policy that sampled."""
        return self.logps.detach() if self.old is None else self.old

    @property
    def columns(self) -> Tensor:
        """The advantages as (B, 1) or (B, C)."""
        return self.advantages[:, None] if self.advantages.dim() == 1 else self.advantages


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The parameters of the losses, by TRL's names."""

    loss_type: str = "dapo"
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float = 0.2
    delta: float | None = None
    importance_sampling_level: str = "token"
    top_entropy_quantile: float = 1.0
    off_policy_mask_threshold: float | None = None
    use_bias_correction_kl: bool = True
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    max_completion_length: int = 1


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the losses of the micro-batches of one step are divided by."""

    micro_batches: int
    tokens: Tensor  # () int64, with a loss, of all of them


class Terms(NamedTuple):
    """The loss of a micro-batch, and what its metrics are made of.

    `loss`: its part of the loss of the step; `own`: its own loss, one element each. `ratios`:
    (B, C), or (B, 1) where they are of sequences; `kl`: (B, C), or None without a reference;
    `chosen`: (B, C) bool, the tokens of high entropy, or None for all; `weights`: (B, 1), VESPO's
    weights of completions.
    """

    loss: Tensor
    own: Tensor
    ratios: Tensor
    kl: Tensor | None
    chosen: Tensor | None
    weights: Tensor | None


def grpo_loss(tokens: Tokens, at: Objective, step: Step) -> Terms:
    """Return the loss of a micro-batch, to be summed over those of a step."""
    loss = LOSSES[at.loss_type]
    log_ratios = tokens.logps - tokens.of_old
    ratios = torch.exp(_of_level(log_ratios, tokens.mask, at.importance_sampling_level))
    kl = None
    if at.beta != 0:
        assert tokens.reference is not None
        kl = kl_term(tokens.logps, tokens.reference)
        kl = kl * ratios if at.use_bias_correction_kl else kl
    found = loss.per_token(tokens, ratios, at)
    per_token, weights = found.losses, found.weights
    if at.off_policy_mask_threshold is not None:
        per_token = per_token * on_policy(tokens, at.off_policy_mask_threshold)
    chosen = None
    if at.top_entropy_quantile < 1:
        chosen = high_entropy(tokens.entropies, tokens.mask, at.top_entropy_quantile)
        per_token = per_token * chosen
    if kl is not None:
        per_token = per_token + at.beta * kl
    own = loss.reduced(per_token, tokens.mask, at, step)
    part = own / step.micro_batches if loss.is_mean else own
    return Terms(part, own.detach(), found.ratios, kl, chosen, weights)


def kl_term(logps: Tensor, reference: Tensor) -> Tensor:
    """Return an unbiased, non-negative estimate of the KL divergence from the reference: (B, C)."""
    return torch.exp(reference - logps) - (reference - logps) - 1


def importance_weights(old: Tensor, sampler: Tensor, mask: Tensor, most: float) -> Tensor:
    """Return p_old / p_sampler of each token, at most `most`: (B, C), 1 where the mask is 0.

    Truncated importance sampling of tokens, as TRL corrects for vLLM's ("token_truncate").
    """
    drift = (old - sampler).masked_fill(~mask.bool(), 0.0)
    return drift.exp().clamp(max=most)


def high_entropy(entropies: Tensor, mask: Tensor, share: float) -> Tensor:
    """Return which tokens are among the `share` with the highest entropy: (B, C) bool.

    Wang et al. 2025, arXiv:2506.01939.
    """
    known = entropies[mask.bool()].float()
    if not len(known):
        return torch.zeros_like(entropies, dtype=torch.bool)
    threshold = torch.quantile(known, 1 - share)
    return (entropies * mask.float() >= threshold) & mask.bool()


def on_policy(tokens: Tokens, most: float) -> Tensor:
    """Return which completions are learned from: (B, 1) or (B, C), 1 or 0.

    Those with an advantage of at least 0, and those whose mean KL from the sampler, in nats per
    token, is at most `most` (DeepSeek-V3.2, arXiv:2512.02556).
    """
    sampler = tokens.of_old if tokens.sampler is None else tokens.sampler
    divergence = ((sampler - tokens.logps.detach()) * tokens.mask).sum(1, keepdim=True)
    divergence = divergence / tokens.mask.sum(1, keepdim=True).clamp(min=1.0)
    return ((tokens.columns >= 0) | (divergence <= most)).to(tokens.mask.dtype)


def mean_entropy(entropies: Tensor, mask: Tensor, chosen: Tensor | None) -> Tensor:
    """Return the mean entropy of the tokens with a loss, for a bonus: one element."""
    kept = mask if chosen is None else mask * chosen
    return (entropies * kept).sum() / kept.sum().clamp(min=1.0)


def _of_level(log_ratios: Tensor, mask: Tensor, level: str) -> Tensor:
    """Return the logarithms of the ratios of tokens (B, C), or of sequences (B, 1).

    Of a sequence: the mean over its tokens (GSPO, Zheng et al. 2025, arXiv:2507.18071, eq. 7).
    """
    if level == "token":
        return log_ratios
    means = (log_ratios * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
    return means.unsqueeze(-1)


# Losses of tokens.


class _PerToken(NamedTuple):
    losses: Tensor
    ratios: Tensor  # as the metrics of clipping count them
    weights: Tensor | None = None


def _clipped(tokens: Tokens, ratios: Tensor, at: Objective) -> _PerToken:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A); r at most delta (arXiv:2505.07291)."""
    advantages = tokens.columns
    clipped = torch.clamp(ratios, 1 - at.epsilon, 1 + at.epsilon_high)
    if at.delta is not None:
        ratios = torch.clamp(ratios, max=at.delta)
    return _PerToken(-torch.min(ratios * advantages, clipped * advantages), ratios)


def _cispo(tokens: Tokens, ratios: Tensor, at: Objective) -> _PerToken:
    """-min(r, epsilon_high) A log p, the first two constant (MiniMax-M1, arXiv:2506.13585)."""
    clipped = torch.clamp(ratios, max=at.epsilon_high).detach()
    return _PerToken(-clipped * tokens.columns * tokens.logps, ratios)


def _sapo(tokens: Tokens, ratios: Tensor, at: Objective) -> _PerToken:
    """-4 / t sigmoid(t (r - 1)) A, t by the sign of A (SAPO, arXiv:2511.20347)."""
    advantages = tokens.columns
    temperatures = torch.where(advantages > 0, at.sapo_temperature_pos, at.sapo_temperature_neg)
    soft = torch.sigmoid(temperatures * (ratios - 1)) * 4 / temperatures
    return _PerToken(-soft * advantages, ratios)


def _vespo(tokens: Tokens, ratios: Tensor, at: Objective) -> _PerToken:
    """-w A log p, w = e^l R^k e^(-l R) constant, R the ratio of the sequence, k and l by the sign
    of A (VESPO, arXiv:2602.10693)."""
    with torch.no_grad():
        log_ratios = torch.clamp(tokens.logps - tokens.of_old, -20.0, 20.0)
        of_sequences = torch.sum(log_ratios * tokens.mask, dim=-1, keepdim=True)
        of_sequences = torch.clamp(of_sequences, math.log(1e-8), 20.0)
        is_good = tokens.columns >= 0
        k = torch.where(is_good, at.vespo_k_pos, at.vespo_k_neg)
        scale = torch.where(is_good, at.vespo_lambda_pos, at.vespo_lambda_neg).clamp(min=1e-4)
        weights = torch.exp(scale + k * of_sequences - scale * torch.exp(of_sequences))
        weights = weights.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return _PerToken(-weights * tokens.columns * tokens.logps, ratios, weights)


# Sums over tokens: (B, C) to one element.


def _mean_of_completions(losses: Tensor, mask: Tensor, at: Objective, step: Step) -> Tensor:
    """The mean over the completions of the mean over their tokens."""
    means = (losses * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
    return means.mean()


def _mean_of_tokens(losses: Tensor, mask: Tensor, at: Objective, step: Step) -> Tensor:
    """The mean over the tokens of a micro-batch."""
    return (losses * mask).sum() / mask.sum().clamp(min=1.0)


def _by_longest(losses: Tensor, mask: Tensor, at: Objective, step: Step) -> Tensor:
    """The sum over the tokens, divided by the most there can be (Dr. GRPO, arXiv:2503.20783)."""
    return (losses * mask).sum() / (len(losses) * at.max_completion_length)


def _by_step(losses: Tensor, mask: Tensor, at: Objective, step: Step) -> Tensor:
    """The sum over the tokens, divided by those of the whole step (DAPO, arXiv:2503.14476)."""
    return (losses * mask).sum() / step.tokens.clamp(min=1.0)


def _sum_of_tokens(losses: Tensor, mask: Tensor, at: Objective, step: Step) -> Tensor:
    """The mean over the completions of the sum over their tokens (LUSPO, arXiv:2602.05261)."""
    return (losses * mask).sum(-1).mean()


class _Loss(NamedTuple):
    per_token: Callable[[Tokens, Tensor, Objective], _PerToken]
    reduced: Callable[[Tensor, Tensor, Objective, Step], Tensor]
    is_mean: (
        bool  # of the micro-batch: the loss of a step is the mean of those of its micro-batches
    )


LOSSES: Mapping[str, _Loss] = {
    "grpo": _Loss(_clipped, _mean_of_completions, is_mean=True),
    "bnpo": _Loss(_clipped, _mean_of_tokens, is_mean=True),
    "dr_grpo": _Loss(_clipped, _by_longest, is_mean=True),
    "dapo": _Loss(_clipped, _by_step, is_mean=False),
    "luspo": _Loss(_clipped, _sum_of_tokens, is_mean=True),
    "cispo": _Loss(_cispo, _by_step, is_mean=False),
    "sapo": _Loss(_sapo, _mean_of_completions, is_mean=True),
    "vespo": _Loss(_vespo, _by_step, is_mean=False),
}
