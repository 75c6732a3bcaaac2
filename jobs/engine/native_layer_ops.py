"""Layer operations in native code: float32 on a CPU, with the same bits as fused decode steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..compute.native import row_entries
from ..compute.native.intrinsics import LANES, WIDTH
from ..compute.native.openmp import address, openmp
from ..compute.native.rowwise import FLOAT
from ..compute.shape import Shape
from .layer_ops import DecodeRows, Norms

_ENOUGH = 16_384  # numbers in a call: with more, several threads are faster than one


class NativeLayerOps:
    """LayerOps in native code, for float32 on a CPU."""

    def __init__(self, shape: Shape) -> None:
        omp = openmp()
        assert omp is not None  # native.is_available
        self._omp = omp
        self._heads, self._kv_heads, self._size = shape.heads, shape.kv_heads, shape.head_dim
        self._constants = np.array([shape.eps, shape.scale], dtype=np.float32)
        self._eps = self._constants.ctypes.data
        self._scale = self._eps + FLOAT

    @staticmethod
    def supports(shape: Shape, embedding: torch.Tensor, norms: Sequence[torch.Tensor]) -> bool:
        """Whether the native code supports a decoder's sizes and dtypes."""
        return (
            embedding.dtype == torch.float32
            and all(norm.dtype == torch.float32 and norm.is_contiguous() for norm in norms)
            and shape.head_dim % WIDTH == 0
            and embedding.shape[1] % LANES == 0
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
        length = x.shape[-1]
        self._run(
            row_entries.rms_norm.address, x.numel(), x.numel() // length, length,
            address(x), address(weight), address(y), self._eps,
        )  # fmt: skip
        return y

    def norm_and_rope(
        self, qkv: torch.Tensor, norms: Norms | None, cos: torch.Tensor, sin: torch.Tensor
    ) -> None:
        of_queries, of_keys = (0, 0) if norms is None else map(address, norms)
        self._run(
            row_entries.norm_and_rope.address, qkv.numel(), len(qkv), self._heads, self._kv_heads,
            self._size, address(qkv), address(cos), address(sin), of_queries, of_keys, self._eps,
        )  # fmt: skip

    def swiglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, twice = gate_up.shape
        y = gate_up.new_empty(rows, twice // 2)
        self._run(
            row_entries.swiglu.address,
            4 * y.numel(),
            rows,
            twice // 2,
            address(gate_up),
            address(y),
        )
        return y

    def attend(
        self,
        qkv: torch.Tensor,
        attended: torch.Tensor,
        decode_rows: Sequence[DecodeRows],
        layer: int,
    ) -> None:
        spans = np.array(
            [
                (rows.row, address(rows.kv.data), rows.kv.capacity, rows.position, rows.count)
                for rows in decode_rows
            ],
            dtype=np.int64,
        )
        longest = int((spans[:, 3] + spans[:, 4]).max())
        scratch_bytes = (longest + 2 * LANES) * FLOAT
        scratch = torch.empty(torch.get_num_threads() * scratch_bytes, dtype=torch.uint8)
        self._run(
            row_entries.attend.address, int(spans[:, 3] @ spans[:, 4]) * self._heads * self._size,
            len(decode_rows), self._heads, self._kv_heads, self._size, layer,
            address(qkv), address(attended), spans.ctypes.data, scratch.data_ptr(),
            scratch_bytes, self._scale,
        )  # fmt: skip

    def _run(self, function: int, numbers: int, *words: int) -> None:
        threads = torch.get_num_threads() if numbers > _ENOUGH else 1
        self._omp.run(function, words, threads=threads)
