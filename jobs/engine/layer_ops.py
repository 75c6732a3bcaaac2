"""What the decoder does between linear layers, row by row: the operations, and PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from ..compute.shape import Shape
from .kv_cache import KeyValues

Norms = tuple[torch.Tensor, torch.Tensor]  # of queries and of keys, (size,) each


@dataclass(frozen=True)
class Single:
    """A row that is the next position of its sequence."""

    row: int
    kv: KeyValues
    position: int


class Rowwise(Protocol):
    """The operations."""

    def normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x / sqrt(mean(x²) + eps) * weight. x: (rows, hidden)."""

    def turn(
        self, qkv: torch.Tensor, norms: Norms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Normalise and turn queries and keys in place.

        qkv: (rows, heads + 2 key heads, size); cos, sin: (rows, 1, size), see rope.Rope.
        """

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """silu(gate) * up. gate_up: (rows, 2 inner); returns (rows, inner)."""

    def attend(
        self, qkv: torch.Tensor, attended: torch.Tensor, singles: Sequence[Single], layer: int
    ) -> None:
        """Put keys and values behind those of the sequences; what queries see goes to `attended`.

        qkv: (rows, heads + 2 key heads, size), turned; attended: (rows, heads, size).
        """


class Torch:
    """By PyTorch's operations, for any device and dtype."""

    def __init__(self, shape: Shape) -> None:
        self._eps, self._scale = shape.eps, shape.scale
        self._heads, self._kv_heads = shape.heads, shape.kv_heads

    def normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, weight.shape, weight, self._eps)

    def turn(
        self, qkv: torch.Tensor, norms: Norms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        num_q, num_qk = self._heads, self._heads + self._kv_heads
        if norms is not None:
            for heads, norm in zip((qkv[:, :num_q], qkv[:, num_q:num_qk]), norms, strict=True):
                heads.copy_(torch.rms_norm(heads, norm.shape, norm, self._eps))
        qk = qkv[:, :num_qk]
        turned = qk.roll(qk.shape[-1] // 2, -1)
        qk.mul_(cos).addcmul_(turned, sin)

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def attend(
        self, qkv: torch.Tensor, attended: torch.Tensor, singles: Sequence[Single], layer: int
    ) -> None:
        heads, kv_heads, size = self._heads, self._kv_heads, qkv.shape[-1]
        for single in singles:
            written, keys, values = single.kv.layers[layer]
            row, end = qkv[single.row], single.position + 1
            written[:, :, end - 1] = row[heads:].view(2, kv_heads, size)
            query = row[:heads].view(1, kv_heads, heads // kv_heads, size)
            attended[single.row] = functional.scaled_dot_product_attention(
                query, keys[:, :, :end], values[:, :, :end], scale=self._scale
            ).reshape(heads, size)  # not contiguous on a GPU
