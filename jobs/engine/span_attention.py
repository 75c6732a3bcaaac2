"""Attention of the tokens of a prompt, in spans on a fixed grid of positions.

A span attends to all earlier positions of its sequence at once. The grid does not depend on how a
prompt is divided into steps, so the bits do not either. Tokens that verify drafts are in no span:
each has the bits of a decode step of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from ..compute.shape import Shape
from .kv_cache import KVCache
from .layer_ops import DecodeRows, LayerOps
from .parts import Attend, Part


@dataclass(frozen=True)
class Span:
    """Consecutive tokens of one sequence within one cell of the grid, more than one."""

    kv: KVCache
    row: int
    begin: int  # position of the first token
    end: int
    mask: torch.Tensor  # causal, (groups * tokens, end)


class Attention:
    """Attention of a batch: computes prompt spans; single tokens go to the layer operations."""

    def __init__(self, shape: Shape, span: int, like: torch.Tensor) -> None:
        """`span`: the grid, in positions. like: the dtype and device of the masks."""
        self._shape = shape
        self._span = span
        self._like = like

    def of(self, parts: Sequence[Part], layer_ops: LayerOps) -> Attend:
        """Return the attention of these parts, as a function of a layer."""
        first, spans, last = self._spans(parts)

        def attend(qkv: torch.Tensor, number: int) -> torch.Tensor:
            attended = torch.empty_like(qkv[:, : self._shape.heads])
            if first:
                layer_ops.attend(qkv, attended, first, number)
            for span in spans:
                self._attend(qkv, attended, span, number)
            if last:
                layer_ops.attend(qkv, attended, last, number)
            return attended

        return attend

    def _spans(
        self, parts: Sequence[Part]
    ) -> tuple[list[DecodeRows], list[Span], list[DecodeRows]]:
        """Return the single tokens that spans of their parts follow, the spans, the other tokens.

        In this order each attends only to keys and values that are there.
        """
        first: list[DecodeRows] = []
        others: list[DecodeRows] = []
        spans, row = [], 0
        for part in parts:
            begin, last = part.kv.length, part.kv.length + len(part.ids)
            if part.verifies:
                others.append(DecodeRows(row, part.kv, begin, len(part.ids)))
                row, begin = row + len(part.ids), last
            while begin < last:
                end = min(begin // self._span * self._span + self._span, last)
                if end - begin == 1:
                    (others if end == last else first).append(DecodeRows(row, part.kv, begin))
                else:
                    spans.append(Span(part.kv, row, begin, end, self._mask(begin, end)))
                row += end - begin
                begin = end
        return first, spans, others

    def _mask(self, begin: int, end: int) -> torch.Tensor:
        like = self._like
        mask = like.new_zeros(end - begin, end)
        columns = torch.arange(end, device=like.device)
        rows = torch.arange(begin, end, device=like.device)
        mask.masked_fill_(columns > rows[:, None], float("-inf"))
        return mask.repeat(self._shape.heads // self._shape.kv_heads, 1)

    def _attend(self, qkv: torch.Tensor, attended: torch.Tensor, span: Span, number: int) -> None:
        """Attention of one span. GQA: the query heads of a KV head are folded into query rows."""
        written, keys, values = span.kv.layers[number]
        begin, end = span.begin, span.end
        shape, heads, size = self._shape, self._shape.kv_heads, self._shape.head_dim
        groups = shape.heads // heads
        count = end - begin
        rows = qkv[span.row : span.row + count]
        new = rows[:, shape.heads :].view(count, 2, heads, size)
        written[:, :, begin:end] = new.permute(1, 2, 0, 3)
        query = rows[:, : shape.heads].view(count, heads, groups, size).permute(1, 2, 0, 3)
        result = functional.scaled_dot_product_attention(
            query.reshape(1, heads, groups * count, size),
            keys[:, :, :end],
            values[:, :, :end],
            attn_mask=span.mask,
            scale=shape.scale,
        ).view(heads, groups, count, size)
        target = attended[span.row : span.row + count].view(count, heads, groups, size)
        target.copy_(result.permute(2, 0, 1, 3))
