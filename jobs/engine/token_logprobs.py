"""Log-probabilities of tokens: natural logarithms of the softmax of the model's own logits.

They are computed before temperature, penalties, top-k, top-p and grammar. Imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..errors import JobFailed
from .request import TokenLogprob
from .sampling import NOT_FINITE

_ROWS = 32  # of logits computed at once: each is a copy of a vocabulary


def token_logprobs(logits: Tensor, tokens: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Return the log-probability of each token, and of the `num_top` most likely ones.

    logits: (T, V), of which row t predicts tokens[t]. Raises JobFailed for a NaN.
    """
    found = []
    for begin in range(0, len(tokens), _ROWS):
        rows = logits[begin : begin + _ROWS].float().log_softmax(-1)
        if bool(rows.isnan().any()):  # comparisons with it are false: any choice would be the best
            raise JobFailed(NOT_FINITE)
        top = rows.topk(num_top, dim=-1) if num_top else None
        for index, token in enumerate(tokens[begin : begin + _ROWS]):
            likely: tuple[tuple[int, float], ...] = ()
            if top is not None:
                values, ids = top.values[index].tolist(), top.indices[index].tolist()
                likely = tuple(zip(ids, values, strict=True))
            found.append(TokenLogprob(token, float(rows[index, token]), likely))
    return found
