"""Choosing the next token of each sequence, each from a generator of its own."""

from __future__ import annotations

import math
from collections import Counter

import torch

from ..errors import JobFailed
from .request import Sampling

_NUCLEUS = 1024  # tokens among which top_p is sought before all are sorted


class Sampler:
    """Chooses the tokens of one sequence. What it draws depends on nothing but the sequence."""

    def __init__(self, sampling: Sampling, index: int) -> None:
        self.sampling = sampling
        self._counts: Counter[int] = Counter()
        # Choices of one seed differ, and each is the same whatever their number is.
        seed = (sampling.seed + index * 0x9E3779B97F4A7C15) % 2**63
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: torch.Tensor) -> int:
        """Return the next token. logits: (V,) of any float dtype, not changed."""
        sampling = self.sampling
        if sampling.is_penalised and self._counts:
            logits = self._penalised(logits)
        if sampling.temperature == 0:
            token = int(logits.argmax())
            _check(logits[token])
        else:
            token = self._draw(logits.float())
        if sampling.is_penalised:
            self._counts[token] += 1
        return token

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        tokens = torch.tensor(list(self._counts), device=logits.device)
        counts = torch.tensor(list(self._counts.values()), device=logits.device)
        penalty = counts * self.sampling.frequency_penalty + self.sampling.presence_penalty
        return logits.float().index_add(0, tokens, penalty, alpha=-1)

    def _draw(self, logits: torch.Tensor) -> int:
        sampling = self.sampling
        tokens = None
        if 0 < sampling.top_k < len(logits):
            logits, tokens = logits.topk(sampling.top_k)
        # Never above 0, so that a tiny temperature gives no infinities.
        probabilities = ((logits - logits.max()) / sampling.temperature).softmax(0)
        if sampling.top_p < 1:
            probabilities, kept = _nucleus(probabilities, sampling.top_p)
            tokens = kept if tokens is None else tokens[kept]
        # 28.5 ms of torch.multinomial on 152k tokens against 0.4 ms. In float64, or the sum of so
        # many small numbers would lose the last ones.
        sums = probabilities.cumsum(0, dtype=torch.float64)
        _check(sums[-1])
        point = torch.rand((), dtype=torch.float64, generator=self._generator) * sums[-1]
        place = min(int(torch.searchsorted(sums, point, right=True)), len(sums) - 1)
        return place if tokens is None else int(tokens[place])


def _check(value: torch.Tensor) -> None:
    if not math.isfinite(value):
        raise JobFailed("model: NaN or Inf in its logits for this prompt")


def _nucleus(probabilities: torch.Tensor, top_p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The likeliest tokens that together have `top_p`, and their numbers."""
    found, tokens = probabilities.topk(min(_NUCLEUS, len(probabilities)))
    sums = found.cumsum(0, dtype=torch.float64)
    if sums[-1] < top_p and len(found) < len(probabilities):
        found, tokens = probabilities.sort(descending=True, stable=True)
        sums = found.cumsum(0, dtype=torch.float64)
    count = int((sums < top_p).sum()) + 1
    return found[:count], tokens[:count]
