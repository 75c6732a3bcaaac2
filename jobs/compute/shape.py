"""Sizes of a decoder's attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """Attention sizes (GQA); `heads` is a multiple of `kv_heads`."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float  # of RMSNorm
    scale: float  # of attention
