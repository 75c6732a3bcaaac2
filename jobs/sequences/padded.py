"""Padded batches, for models that cannot be packed exactly. Imports torch."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from ..models.adapters import unwrapped
from .logprobs import CHUNK_BYTES, Scores, score_logits
from .sequence import Sequence


class Padded:
    """Sequences as the rows of one batch, padded on the right to T tokens.

    ids, is_token, positions: (B, T) int64. For the K tokens with a weight, (K,) each: own_rows and
    predictors, the place in the batch whose output predicts the token; targets, rows, columns and
    weights as in a Pack.
    """

    def __init__(self, sequences: list[Sequence], pad_id: int, device: Any) -> None:
        longest = max(len(one.tokens) for one in sequences)
        ids = torch.full((len(sequences), longest), pad_id)
        is_token = torch.zeros_like(ids)
        scored: list[tuple[int, int, int, int, int]] = []
        weights: list[float] = []
        for number, one in enumerate(sequences):
            ids[number, : len(one.tokens)] = torch.tensor(one.tokens)
            is_token[number, : len(one.tokens)] = 1
            for t in one.scored:
                scored.append((number, t - 1, one.tokens[t], one.row, one.column + t))
                weights.append(one.weights[t])
        self.ids, self.is_token = ids.to(device), is_token.to(device)
        self.positions = (self.is_token.cumsum(1) - 1).clamp(min=0)
        table = torch.tensor(scored, dtype=torch.int64, device=device).view(-1, 5)
        self.own_rows, self.predictors, self.targets, self.rows, self.columns = table.unbind(1)
        self.weights = torch.tensor(weights, dtype=torch.float32, device=device)


def score_padded(
    model: Any,
    batch: Padded,
    temperature: float = 1.0,
    *,
    is_half: bool = False,
    balances: bool = False,
    has_entropy_gradient: bool = False,
) -> tuple[Scores, Tensor | None]:
    """Return the scores of a batch's K scored tokens by the model's own forward pass.

    `is_half`: as of `score_pack`. `balances`: whether the loss that balances a mixture of experts
    is returned, too.
    """
    length = batch.ids.shape[1]
    given: dict[str, Any] = {"position_ids": batch.positions}
    vocabulary = unwrapped(model).config.get_text_config().vocab_size
    if len(batch.predictors) and 4 * batch.ids.numel() * vocabulary > CHUNK_BYTES:
        given["logits_to_keep"] = length - int(batch.predictors.min())
    takes = inspect.signature(unwrapped(model).forward).parameters
    more: dict[str, Any] = {name: value for name, value in given.items() if name in takes}
    if balances:
        more["output_router_logits"] = True
    with torch.autocast(batch.ids.device.type, torch.bfloat16, enabled=is_half):
        output = model(input_ids=batch.ids, attention_mask=batch.is_token, use_cache=False, **more)
    left_out = length - output.logits.shape[1]
    scores = score_logits(
        output.logits[batch.own_rows, batch.predictors - left_out],
        batch.targets,
        temperature,
        has_entropy_gradient=has_entropy_gradient,
    )
    return scores, output.aux_loss if balances else None
