"""Log-probabilities of tokens: natural logarithms of the softmax of the model's own logits.

They are computed before temperature, penalties, top-k, top-p and grammar. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import JobFailed
from .request import TokenLogprob
from .sampling import NOT_FINITE

_ROWS = 32  # of logits computed at once: each is a copy of a vocabulary


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return the log-probability of each token, and of the `num_top` most likely ones.

    logits: (T, V), of which row t predicts tokens[t]. Raises JobFailed for a NaN.
    """
    found: list[TokenLogprob] = []
    for begin in range(0, len(tokens), _ROWS):
        rows = logits[begin : begin + _ROWS].float().log_softmax(-1)
        if bool(rows.isnan().any()):  # comparisons with it are false: any choice would be the best
            raise JobFailed(NOT_FINITE)
        chosen = torch.tensor(tokens[begin : begin + _ROWS], device=rows.device)
        of_chosen: list[float] = rows.gather(-1, chosen[:, None])[:, 0].tolist()
        likely: list[tuple[tuple[int, float], ...]] = [()] * len(of_chosen)
        if num_top:
            top = rows.topk(num_top, dim=-1)
            pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True)
            likely = [tuple(zip(ids, values, strict=True)) for ids, values in pairs]
        found += map(TokenLogprob, tokens[begin : begin + _ROWS], of_chosen, likely)
    return found
