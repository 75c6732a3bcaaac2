"""What the decoder does between its products, row by row: PyTorch's way, and our own on a CPU.

Ours computes the same bits as the steps of `native`, which take over where few rows are alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch.nn import functional

from .cache import KeyValues
from .native import passes
from .native.rows import FLOAT
from .native.team import Team, address
from .native.vectors import LANES, WIDTH

if TYPE_CHECKING:
    from .decoder import Decoder

Norms = tuple[torch.Tensor, torch.Tensor]  # of queries and of keys, (size,) each

_ENOUGH = 16_384  # numbers in all, from which on several threads are faster than one


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

        qkv: (rows, heads + 2 key heads, size); cos, sin: (rows, 1, size), see decoder.Rope.
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

    def __init__(self, decoder: Decoder) -> None:
        self._eps = decoder.eps
        self._heads, self._kv_heads, self._scale = decoder.heads, decoder.kv_heads, decoder.scale

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


class Native:
    """By our own code, for float32 on a CPU."""

    def __init__(self, decoder: Decoder, team: Team) -> None:
        self._team = team
        self._heads, self._kv_heads, self._size = decoder.heads, decoder.kv_heads, decoder.size
        self._constants = np.array([decoder.eps, decoder.scale], dtype=np.float32)
        self._eps = self._constants.ctypes.data
        self._scale = self._eps + FLOAT

    @staticmethod
    def takes(decoder: Decoder) -> bool:
        """Whether a model has sizes, and a form, that this code is for."""
        weight = decoder.embedding
        norms = [decoder.norm]
        for layer in decoder.layers:
            norms += [layer.attention_norm, layer.mlp_norm, *(layer.head_norms or ())]
        return (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and all(norm.dtype == torch.float32 and norm.is_contiguous() for norm in norms)
            and decoder.size % WIDTH == 0
            and weight.shape[1] % LANES == 0
        )

    def normalise(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        length = x.shape[-1]
        self._run(
            passes.normalise.address, x.numel(), x.numel() // length, length,
            address(x), address(weight), address(y), self._eps,
        )  # fmt: skip
        return y

    def turn(
        self, qkv: torch.Tensor, norms: Norms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        of_queries, of_keys = (0, 0) if norms is None else map(address, norms)
        self._run(
            passes.turn.address, qkv.numel(), len(qkv), self._heads, self._kv_heads, self._size,
            address(qkv), address(cos), address(sin), of_queries, of_keys, self._eps,
        )  # fmt: skip

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, twice = gate_up.shape
        y = gate_up.new_empty(rows, twice // 2)
        self._run(
            passes.gate.address, 4 * y.numel(), rows, twice // 2, address(gate_up), address(y)
        )
        return y

    def attend(
        self, qkv: torch.Tensor, attended: torch.Tensor, singles: Sequence[Single], layer: int
    ) -> None:
        spans = np.array(
            [
                (single.row, address(single.kv.data), single.kv.capacity, single.position)
                for single in singles
            ],
            dtype=np.int64,
        )
        longest = int(spans[:, 3].max()) + 1
        scratch_bytes = (longest + 2 * LANES) * FLOAT
        scratch = torch.empty(torch.get_num_threads() * scratch_bytes, dtype=torch.uint8)
        self._run(
            passes.attend.address, int(spans[:, 3].sum()) * self._heads * self._size,
            len(singles), self._heads, self._kv_heads, self._size, layer,
            address(qkv), address(attended), spans.ctypes.data, scratch.data_ptr(),
            scratch_bytes, self._scale,
        )  # fmt: skip

    def _run(self, function: int, numbers: int, *words: int) -> None:
        threads = torch.get_num_threads() if numbers > _ENOUGH else 1
        self._team.run(function, words, threads=threads)
