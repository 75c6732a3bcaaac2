"""Padded batches of a model's own forward pass, for models that the decoder cannot compute.

All sequences begin together and get a token in each pass. Every token has its position; ended
sequences stay in the batch, and nothing is read of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.adapters import unwrapped
from .parts import Part

TOLERANCE = 1e-3  # share of the range of logits within which two computations of them are equal


@dataclass(eq=False)
class PaddedSequence:
    """A row of the batch, and the tokens of a sequence so far."""

    row: int = -1
    length: int = 0


class PaddedRunner:
    """Computes the logits of one batch, whose prompts are padded on the left (see Decoder).

    `pad_id`: the token that pads them.
    """

    chunk: int | None = None  # prompts are computed in one pass
    forks = False

    def __init__(self, model: Any, pad_id: int) -> None:
        self._model = model
        self._pad_id = pad_id
        self._cache: Any = None
        self._mask = torch.empty(0)  # (B, T) int64 of the tokens so far
        self._takes = inspect.signature(unwrapped(model).forward).parameters
        # Its name differs between versions of transformers.
        names = ("cache", "past_key_values")
        self._cache_name = next((name for name in names if name in self._takes), None)

    def num_bytes(self, capacity: int) -> int:
        """Return 0: the model itself decides what its cache takes."""
        return 0

    def new(self, capacity: int) -> PaddedSequence:
        """Return an empty sequence."""
        return PaddedSequence()

    @torch.no_grad()
    def forward(self, parts: Sequence[Part]) -> Tensor:
        """Begin the sequences of a batch, or append a token to each; return logits (N, V)."""
        kvs = [part.kv for part in parts]
        if not kvs[0].length:
            logits = self._begin([part.ids for part in parts])
            for row, kv in enumerate(kvs):
                kv.row = row
        else:
            rows = torch.tensor([kv.row for kv in kvs], device=self._mask.device)
            ids = torch.full((len(self._mask), 1), self._pad_id, device=rows.device)
            ids[rows, 0] = torch.tensor([part.ids[0] for part in parts], device=rows.device)
            self._mask = torch.cat([self._mask, torch.ones_like(ids)], 1)
            logits = self._forward(ids)[rows]
        for part in parts:
            part.kv.length += len(part.ids)
        return logits

    @torch.no_grad()
    def is_exact(self) -> bool:
        """Whether the model computes a padded batch as each sequence alone, to rounding."""
        if self._cache_name is None or not {"attention_mask", "position_ids"} <= self._takes.keys():
            return False
        try:
            found = self._two_passes(([1, 2], [3, 2, 1, 4]), (5, 1))
            for row, (prompt, token) in enumerate((([1, 2], 5), ([3, 2, 1, 4], 1))):
                alone = self._two_passes([prompt], [token])
                for batch, single in zip(found, alone, strict=True):
                    off = (batch[row] - single[0]).abs().max()
                    if not bool(off <= TOLERANCE * (single.max() - single.min())):
                        return False
        except Exception:  # any error: the model needs another kind of cache
            return False
        return True

    def _two_passes(self, prompts: Sequence[Sequence[int]], tokens: Sequence[int]) -> list[Tensor]:
        kvs = [self.new(0) for _ in prompts]
        passes = (prompts, [[token] for token in tokens])
        return [
            self.forward([Part(*one, True) for one in zip(kvs, ids, strict=True)]) for ids in passes
        ]

    def _begin(self, prompts: Sequence[Sequence[int]]) -> Tensor:
        device = self._model.device
        longest = max(map(len, prompts))
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        places = torch.arange(longest, device=device)[None]
        self._mask = (places >= longest - lengths[:, None]).long()
        self._cache = None
        return self._forward(left_padded(prompts, longest, self._pad_id, device))

    def _forward(self, ids: Tensor) -> Tensor:
        assert self._cache_name is not None
        more = {self._cache_name: self._cache}
        if "logits_to_keep" in self._takes:
            more["logits_to_keep"] = 1
        output = self._model(
            input_ids=ids,
            attention_mask=self._mask,
            position_ids=(self._mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :],
            use_cache=True,
            **more,
        )
        self._cache = output[self._cache_name]
        logits: Tensor = output.logits[:, -1]
        return logits


def left_padded(rows: Sequence[Sequence[int]], length: int, pad_id: int, device: Any) -> Tensor:
    """Return rows of token ids, padded on the left: (rows, length) int64."""
    return torch.tensor([[pad_id] * (length - len(row)) + list(row) for row in rows], device=device)
