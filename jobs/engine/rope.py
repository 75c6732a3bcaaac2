"""Rotary position embedding (RoPE; Su et al. 2021, arXiv:2104.09864), looked up in a table."""

from __future__ import annotations

from typing import Any

import torch


class Rope:
    """Cosines and sines of positions, computed once and then looked up."""

    def __init__(self, rotary: Any, like: torch.Tensor) -> None:
        sections = (rotary.config.rope_parameters or {}).get("mrope_section")
        # Which of time, row and column turns each element of a head (Qwen2-VL, section 2.1).
        self._axes: torch.Tensor | None = None
        if sections:
            half = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
            self._axes = torch.cat([half, half]).to(like.device)
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
