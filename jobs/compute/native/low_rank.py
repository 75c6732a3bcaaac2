"""Low-rank updates of a linear layer, y += B A x, for few rows in one call.

A decode step with a LoRA adapter adds some to every linear layer. They are small, but like all
weights they come from memory once per token: each thread reads its share, each piece as one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from . import layout as p
from .compiling import entry
from .intrinsics import LANES, address_of, call as invoke, dot, floats, fma, words
from .openmp import address, openmp
from .rowwise import FLOAT, WORD
from .work_stealing import claim, wait_for_all

_OUTPUTS = 128  # of a block, at most

# Words of a block: its outputs in y, the part of h that it multiplies, its weights (ranks, count).
_FIRST, _COUNT, _RANK, _RANKS, _WEIGHT = range(5)
_BLOCK = 5


@entry
def _add(data: Any) -> None:
    """Entry point: h (rows, rank) = x a^T, then y (rows, outputs) += h b, block by block.

    Words after the two of OpenMP.run: barrier; a (rank, inputs), rank, inputs; blocks, their
    number; x (rows, inputs), rows; y, its outputs; h; `claimed`: two words per thread, initially 0.
    """
    c = words(address_of(data))
    thread, threads = np.int64(invoke(c[p.THREAD])), np.int64(invoke(c[p.THREADS]))
    a, rank, inputs, blocks, count = c[3], c[4], c[5], c[6], c[7]
    x, rows, y, outputs, claimed = c[8], c[9], c[10], c[11], c[13]
    h = floats(c[12])
    while True:
        k = claim(rank, thread, threads, claimed)
        if k < 0:
            break
        for row in range(rows):
            h[row * rank + k] = dot(x + row * inputs * FLOAT, a + k * inputs * FLOAT, inputs)
    claimed = wait_for_all(c[p.BARRIER], claimed, threads)
    while True:
        number = claim(count, thread, threads, claimed)
        if number < 0:
            break
        block = words(blocks + number * _BLOCK * WORD)
        size = block[_COUNT]
        for row in range(rows):
            target = floats(y + (row * outputs + block[_FIRST]) * FLOAT)
            for k in range(block[_RANKS]):
                factor = h[row * rank + block[_RANK] + k]
                source = floats(block[_WEIGHT] + k * size * FLOAT)
                for i in range(size):
                    target[i] = fma(factor, source[i], target[i])


@dataclass(frozen=True)
class Part:
    """One update, B A: a (rank, inputs), b (outputs, rank) float32; y's outputs from `first` on."""

    a: torch.Tensor
    b: torch.Tensor
    first: int


class LowRankUpdates:
    """The updates of one linear layer, with packed copies of their weights."""

    def __init__(self, parts: Sequence[Part]) -> None:
        omp = openmp()
        assert omp is not None  # native.is_available
        self._omp = omp
        self._a = torch.cat([part.a for part in parts])
        self._weights: list[torch.Tensor] = []  # keeps the memory of the addresses in `_blocks`
        blocks: list[list[int]] = []
        rank = 0
        for part in parts:
            ranks = len(part.a)
            for begin in range(0, len(part.b), _OUTPUTS):
                weight = part.b[begin : begin + _OUTPUTS].t().contiguous()
                self._weights.append(weight)
                count = weight.shape[1]
                blocks.append([part.first + begin, count, rank, ranks, address(weight)])
            rank += ranks
        self._blocks = np.array(blocks, dtype=np.int64)

    @staticmethod
    def supports(a: torch.Tensor) -> bool:
        """Whether an update with a weight A (rank, inputs) can be computed."""
        is_float32 = a.device.type == "cpu" and a.dtype == torch.float32
        return is_float32 and a.shape[1] % LANES == 0

    def add_to(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """Add the updates for x (rows, inputs) to y (rows, outputs); both float32, contiguous."""
        (rank, inputs), rows = self._a.shape, len(x)
        threads = torch.get_num_threads()
        h = x.new_empty(rows, rank)
        claimed = np.zeros(2 * threads, dtype=np.int64)
        self._omp.run(
            _add.address,
            [
                self._omp.barrier, address(self._a), rank, inputs,
                self._blocks.ctypes.data, len(self._blocks), address(x), rows,
                address(y), y.shape[1], address(h), claimed.ctypes.data,
            ],
            threads=threads,
        )  # fmt: skip
