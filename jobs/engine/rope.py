"""Rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864), looked up in a table."""

from __future__ import annotations

from typing import Any

import torch


class Rope:
    """Cosines and sines of positions, computed once and then looked up."""

    def __init__(self, rotary: Any, like: torch.Tensor) -> None:
        self._axes = _axes(rotary, like.device) if hasattr(rotary, "mrope_section") else None
        self._frequencies = rotary.inv_freq.float()
        self._scaling: float = rotary.attention_scaling
        self._like = like
        self._cos = self._sin = like.new_empty(0, 0)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of positions (rows,) or (3, rows), on the CPU, as (rows, 1, size).

        The first half of sin is negated: then x cos + roll(x, size / 2) sin turns x.
        """
        self.tables(int(positions.max()) + 1)
        positions = positions.to(self._cos.device)
        if positions.ndim == 1:
            return self._cos[positions][:, None], self._sin[positions][:, None]
        assert self._axes is not None
        elements = torch.arange(len(self._axes), device=positions.device)
        # (rows, size): the position that turns each element. What is looked up lies in its order.
        rows = positions[self._axes].T.contiguous()
        return self._cos[rows, elements][:, None], self._sin[rows, elements][:, None]

    def tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of at least so many positions, (positions, size) each; never changed."""
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
    """Which of time, row and column turns each element of a head: (size,) of 0, 1 and 2.

    Asked of the model's own: Qwen2-VL has a section for each, Qwen3-VL has them in turn.
    """
    # Three positions, each of them 1 on one axis and 0 on the others: (axes, 1, positions).
    positions = torch.eye(3, device=device)[:, None]
    _, sin = rotary(torch.zeros(0, device=device), positions)
    axes: torch.Tensor = sin[0].abs().argmax(0)
    return axes
