"""Rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864), looked up in a table."""

from __future__ import annotations

from typing import Any

import torch


class Rope:
    """Table of cos and sin by position, grown on demand. M-RoPE models have three axes."""

    def __init__(self, rotary: Any, like: torch.Tensor) -> None:
        self._axes = _axes(rotary, like.device) if hasattr(rotary, "mrope_section") else None
        self._frequencies = rotary.inv_freq.float()
        self._scaling: float = rotary.attention_scaling
        self._like = like
        self._cos = self._sin = like.new_empty(0, 0)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos and sin, (tokens, 1, head_dim) each. positions: (tokens,) or (3, tokens), CPU.

        The first half of sin is negated: x cos + roll(x, head_dim / 2) sin rotates x.
        """
        self.tables(int(positions.max()) + 1)
        positions = positions.to(self._cos.device)
        if positions.ndim == 1:
            return self._cos[positions][:, None], self._sin[positions][:, None]
        assert self._axes is not None
        elements = torch.arange(len(self._axes), device=positions.device)
        # (tokens, head_dim): the position of each element's axis.
        places = positions[self._axes].T.contiguous()
        return self._cos[places, elements][:, None], self._sin[places, elements][:, None]

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return tables of at least `length` positions, (positions, head_dim) each; read-only."""
        if length > len(self._cos):
            self._grow(max(length, 2 * len(self._cos), 256))
        return self._cos, self._sin

    def _grow(self, length: int) -> None:
        positions = torch.arange(length, device=self._frequencies.device, dtype=torch.float)
        angles = positions[:, None] * self._frequencies
        cos, sin = angles.cos() * self._scaling, angles.sin() * self._scaling
        self._cos = torch.cat([cos, cos], dim=1).to(self._like.dtype)
        self._sin = torch.cat([-sin, sin], dim=1).to(self._like.dtype)


def _axes(rotary: Any, device: torch.device) -> torch.Tensor:
    """Return the axis of each element of a head, (head_dim,): 0 time, 1 row, 2 column.

    Probed on the model's rotary module: Qwen2-VL has one section per axis, Qwen3-VL interleaves.
    """
    # Three positions, each 1 on one axis and 0 on the others: (axes, 1, positions).
    positions = torch.eye(3, device=device)[:, None]
    _, sin = rotary(torch.zeros(0, device=device), positions)
    axes: torch.Tensor = sin[0].abs().argmax(0)
    return axes
