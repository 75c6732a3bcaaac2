"""Layer operations between linear layers: RMSNorm, RoPE, SwiGLU, attention; in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from ..compute.shape import Shape
from .kv_cache import KVCache

Norms = tuple[torch.Tensor, torch.Tensor]  # of queries and of keys, (head_dim,) each


@dataclass(frozen=True)
class DecodeRows:
    """Rows of the batch: consecutive tokens of one sequence, each computed like a decode step."""

    row: int  # the first one
    kv: KVCache
    position: int  # of the first one
    count: int = 1


class LayerOps(Protocol):
    """Layer operations. Implementations: TorchLayerOps and NativeLayerOps."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm: x / sqrt(mean(x²) + eps) * weight. x: (rows, hidden)."""

    def norm_and_rope(
        self, qkv: torch.Tensor, norms: Norms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        """Apply RMSNorm (if `norms`) and RoPE to queries and keys, in place.

        qkv: (rows, heads + 2 kv_heads, head_dim); cos, sin: (rows, 1, head_dim), see rope.Rope.
        """

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SwiGLU: silu(gate) * up. gate_up: (rows, 2 inner); returns (rows, inner)."""

    def attend(
        self,
        qkv: torch.Tensor,
        attended: torch.Tensor,
        decode_rows: Sequence[DecodeRows],
        layer: int,
    ) -> None:
        """Append keys and values to the KV caches, and write attention to `attended`.

        A row attends to the earlier ones of its sequence, with the bits of a step of its own.
        qkv: (rows, heads + 2 kv_heads, head_dim) after RoPE; attended: (rows, heads, head_dim).
        """


class TorchLayerOps:
    """LayerOps in PyTorch, for any device and dtype."""

    def __init__(self, shape: Shape) -> None:
        self._eps, self._scale = shape.eps, shape.scale
        self._heads, self._kv_heads = shape.heads, shape.kv_heads

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.rms_norm(x, weight.shape, weight, self._eps)

    def norm_and_rope(
        self, qkv: torch.Tensor, norms: Norms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        num_q, num_qk = self._heads, self._heads + self._kv_heads
        if norms is not None:
            for heads, norm in zip((qkv[:, :num_q], qkv[:, num_q:num_qk]), norms, strict=True):
                heads.copy_(torch.rms_norm(heads, norm.shape, norm, self._eps))
        qk = qkv[:, :num_qk]
        rolled = qk.roll(qk.shape[-1] // 2, -1)
        qk.mul_(cos).addcmul_(rolled, sin)

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate).mul_(up)

    def attend(
        self,
        qkv: torch.Tensor,
        attended: torch.Tensor,
        decode_rows: Sequence[DecodeRows],
        layer: int,
    ) -> None:
        heads, kv_heads, size = self._heads, self._kv_heads, qkv.shape[-1]
        for of_sequence in decode_rows:
            written, keys, values = of_sequence.kv.layers[layer]
            for place in range(of_sequence.count):
                number, end = of_sequence.row + place, of_sequence.position + place + 1
                row = qkv[number]
                written[:, :, end - 1] = row[heads:].view(2, kv_heads, size)
                query = row[:heads].view(1, kv_heads, heads // kv_heads, size)
                attended[number] = functional.scaled_dot_product_attention(
                    query, keys[:, :, :end], values[:, :, :end], scale=self._scale
                ).reshape(heads, size)  # not contiguous on a GPU
