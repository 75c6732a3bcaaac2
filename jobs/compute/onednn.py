"""oneDNN linear layers: every private torch operation that warmd calls, and one probe of them.

Any torch release may rename them. `is_available` tries each once; if one is missing or fails,
callers use torch's public operations from the first token on.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_ops: Any = torch.ops
ZERO_POINT = 128  # of quantized inputs (uint8): oneDNN is 1,000 times slower with signed ones


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """y (rows, out) = x W^T + b. `weight`: (out, in) with any strides, or packed by `pack`."""
    y: Tensor = _ops.mkldnn._linear_pointwise.default(x, weight, bias, "none", [], "")
    return y


def pack(weight: Tensor) -> Tensor:
    """Pack weights (out, in) of float32 or bfloat16 in oneDNN's order."""
    packed: Tensor = _ops.mkldnn._reorder_linear_weight(weight, None)
    return packed


def pack_int8(weight: Tensor) -> Tensor:
    """Pack int8 weights (out, in) in oneDNN's order."""
    packed: Tensor = _ops.onednn.qlinear_prepack(weight, None)
    return packed


def linear_int8(x: Tensor, packed: Tensor, scale: Tensor, zeros: Tensor) -> Tensor:
    """y (rows, out) float32 = scale * ((x - ZERO_POINT) W^T).

    x: (rows, in) uint8; scale: (out,) float32; zeros: (out,) int64 zeros.
    """
    y: Tensor = _ops.onednn.qlinear_pointwise.default(
        x, 1.0, ZERO_POINT, packed, scale, zeros, None, 1.0, 0, torch.float32, "none", [], ""
    )
    return y


def address_of(packed: Tensor) -> int:
    """Return the address of packed weights."""
    address: int = _ops.mkldnn.data_ptr(packed)
    return address


def bytes_of(packed: Tensor) -> int:
    """Return the bytes of packed weights."""
    num_bytes: int = _ops.mkldnn._nbytes(packed)
    return num_bytes


def has_bfloat16() -> bool:
    """Whether oneDNN supports bfloat16 here, possibly emulated, several times slower."""
    return is_available() and bool(_ops.mkldnn._is_mkldnn_bf16_supported())


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether every operation of this module exists and is correct, tried on a small layer."""
    weight, x = torch.eye(64), torch.arange(64.0)[None]
    try:
        packed = pack(weight)
        has_all = bool(address_of(packed) and bytes_of(packed))
        has_all &= torch.equal(linear(x, packed, None), x) and torch.equal(
            linear(x, weight, x[0]), 2 * x
        )
        scale, zeros = torch.ones(64), torch.zeros(64, dtype=torch.int64)
        eights = pack_int8(weight.to(torch.int8))
        has_all &= torch.equal(linear_int8(x.to(torch.uint8) + ZERO_POINT, eights, scale, zeros), x)
        _ops.mkldnn._is_mkldnn_bf16_supported()
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        # These are private operations: another torch may lack one (AttributeError), not implement
        # it for this processor (NotImplementedError, RuntimeError) or take other arguments
        # (TypeError, RuntimeError). The portable path is used then.
        return False
    return has_all


@lru_cache(maxsize=1)
def has_exact_int8() -> bool:
    """Whether int8 sums are exact, tried on inputs that saturate where that is possible.

    Without VNNI oneDNN sums pairs of products in int16, which overflow: up to 2 * 255 * 127.
    """
    if not is_available():
        return False
    x = torch.full((64, 256), 255, dtype=torch.uint8)
    weight = torch.full((128, 256), 127, dtype=torch.int8)
    scale, zeros = torch.ones(128), torch.zeros(128, dtype=torch.int64)
    packed, expected = pack_int8(weight), (255 - ZERO_POINT) * 127 * 256
    return all(
        bool((linear_int8(x[:rows], packed, scale, zeros) == expected).all()) for rows in (1, 4, 64)
    )
