"""Log-probabilities of target tokens, without materializing the logits of a whole batch.

The vocabulary head dominates the arithmetic of a small model, and its logits dominate the memory.
Here it runs only at target positions, in chunks, and computes the entropies as well. Imports torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

CHUNK_BYTES = 512 * 2**20  # logits per chunk: enough rows for full GEMM speed
BLOCK_BYTES = 16 * 2**20  # of a chunk, for everything but the GEMM: bounds temporary tensors
KEPT_BYTES = 1024 * 2**20  # most probabilities that are kept for the backward pass


class Scores(NamedTuple):
    """Log-probabilities and entropies of K tokens: (K,) float32 each, in nats.

    `is_top`: whether the token has the highest probability, (K,) bool; (0,) unless requested.
    """

    logps: Tensor
    entropies: Tensor
    is_top: Tensor


def score(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    kept_bytes: int = KEPT_BYTES,
    wants_top: bool = False,
    has_entropy_gradient: bool = False,
) -> Scores:
    """Return log softmax(hidden @ weight.T / temperature) at `targets`, and the entropies.

    hidden: (K, H), weight: (V, H), targets: (K,) int64. The log-probabilities are differentiable,
    the entropies where `has_entropy_gradient`. The probabilities are kept for the backward pass if
    they take at most `kept_bytes`, and recomputed otherwise. Matrix multiplications run in the
    dtype of `hidden`, everything else in float32.
    """
    return Scores(
        *cast(Any, _Score).apply(
            hidden, weight, targets, temperature, kept_bytes, wants_top, has_entropy_gradient
        )
    )


def score_logits(
    logits: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    *,
    has_entropy_gradient: bool = False,
) -> Scores:
    """Return `score` of logits (K, V) that a model's own forward pass has computed."""
    scaled = logits.float() if temperature == 1 else logits.float() / temperature
    log_p = torch.log_softmax(scaled, -1)
    logps = log_p.gather(1, targets[:, None])[:, 0]
    with torch.set_grad_enabled(has_entropy_gradient and torch.is_grad_enabled()):
        entropies = -torch.linalg.vecdot(log_p.exp(), log_p.nan_to_num(neginf=0.0))
    with torch.no_grad():
        is_top = logps >= log_p.amax(-1)
    return Scores(logps, entropies, is_top)


class _Score(torch.autograd.Function):
    """One GEMM forward; two backward, or three when the probabilities are recomputed."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        kept_bytes: int,
        wants_top: bool,
        has_entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, words = len(hidden), len(weight)
        needs_gradient = any(ctx.needs_input_grad)
        keeps = needs_gradient and 4 * count * words <= kept_bytes
        kept = hidden.new_empty((count, words), dtype=torch.float32) if keeps else None
        logps = hidden.new_empty(count, dtype=torch.float32)
        entropies = torch.empty_like(logps)
        is_top = logps.new_empty(count if wants_top else 0, dtype=torch.bool)
        head = weight.to(hidden.dtype)
        for chunk in _chunks(count, words):
            logits = _logits(hidden[chunk], head, None if kept is None else kept[chunk])
            for block in _blocks(len(logits), words):
                rows = slice(chunk.start + block.start, chunk.start + block.stop)
                log_p = _log_softmax_(logits[block], temperature)
                logps[rows] = log_p.gather(1, targets[rows, None])[:, 0]
                if wants_top:
                    is_top[rows] = logps[rows] >= log_p.amax(-1)
                p = log_p.exp()
                # A token of probability 0 contributes 0, although its log-probability is -inf.
                entropies[rows] = -torch.linalg.vecdot(p, log_p.nan_to_num_(neginf=0.0))
                if kept is not None:  # `logits` is a view of it
                    kept[rows] = p
        if needs_gradient:
            saved = entropies if has_entropy_gradient else None
            ctx.save_for_backward(hidden, weight, targets, kept, saved)
            ctx.temperature = temperature
        ctx.mark_non_differentiable(*(() if has_entropy_gradient else (entropies,)), is_top)
        return logps, entropies, is_top

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        hidden, weight, targets, kept, entropies = ctx.saved_tensors
        scale = gradients[0] / ctx.temperature
        for_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        # Also of no scored tokens: the embedding that shares the weight adds to its gradient.
        needs_weight = ctx.needs_input_grad[1]
        for_weight = torch.zeros_like(weight) if needs_weight and not len(hidden) else None
        head = weight.to(hidden.dtype)
        for rows in _chunks(len(hidden), len(weight)):
            if kept is None:
                p = _logits(hidden[rows], head)
                for block in _blocks(len(p), len(weight)):
                    _log_softmax_(p[block], ctx.temperature).exp_()
            else:
                p = kept[rows]
            bonus = None
            if entropies is not None:
                slope = gradients[1][rows, None] / ctx.temperature
                bonus = _entropy_gradient(p, entropies[rows, None]).mul_(slope)
            # In place: the gradient of the logits is scale x (one_hot(target) - p).
            p.mul_(-scale[rows, None]).scatter_add_(1, targets[rows, None], scale[rows, None])
            p = (p if bonus is None else p.add_(bonus)).to(head.dtype)
            if for_hidden is not None:
                for_hidden[rows] = p @ head
            if needs_weight:
                part = (p.t() @ hidden[rows]).to(weight.dtype)
                for_weight = part if for_weight is None else for_weight.add_(part)
        return for_hidden, for_weight, None, None, None, None, None


def _entropy_gradient(p: Tensor, entropies: Tensor) -> Tensor:
    """Return the gradient of entropies (K, 1) by the logits: -p (log p + entropy), (K, V)."""
    log_p = p.log().nan_to_num_(neginf=0.0)  # a token of probability 0 contributes 0
    return log_p.add_(entropies).mul_(p).neg_()


def _logits(hidden: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return hidden @ weight.T, (rows, V) float32, in `out` if it is given."""
    if hidden.dtype == torch.float32:
        return torch.mm(hidden, weight.t(), out=out)
    logits = hidden @ weight.t()
    return logits.float() if out is None else out.copy_(logits)


def _log_softmax_(logits: Tensor, temperature: float) -> Tensor:
    """Turn logits (rows, V) into log softmax(logits / temperature), in place."""
    if temperature != 1:
        logits.div_(temperature)
    return logits.sub_(logits.logsumexp(-1, keepdim=True))


def _blocks(count: int, words: int) -> list[slice]:
    size = max(1, BLOCK_BYTES // (4 * words))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _chunks(count: int, words: int) -> list[slice]:
    # Chunks of equal size: a last chunk of a few rows would be slow.
    pieces = max(1, -(-4 * count * words // CHUNK_BYTES))
    size = max(1, -(-count // pieces))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
