"""Layer operations on one row in float32: RMSNorm, RoPE, SwiGLU and attention.

Arguments are addresses. Decode steps and prefill use the same functions, so a row has the same bits
in both.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .compiling import compiled
from .gemm import FLOAT32, gemm
from .intrinsics import LANES, WIDTH, dot, float_of, floats, fma, max_of, sum_of

FLOAT, WORD = 4, 8  # bytes

_sum_up = gemm(FLOAT32, WIDTH, 1)

_ZERO, _HALF, _ONE = np.float32(0), np.float32(0.5), np.float32(1)
# Cephes' expf: e^x = 2^n e^r, where |r| <= ln(2) / 2; its error is below 2 units in the last place.
_SMALLEST, _LARGEST = np.float32(-87), np.float32(89)  # e^89 overflows to infinity
_LOG2_E = np.float32(1.44269504)
_LN2_HIGH, _LN2_LOW = np.float32(-0.693359375), np.float32(2.12194440e-4)
_P0, _P1, _P2, _P3, _P4, _P5 = map(
    np.float32,
    (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 0.166666655, 0.5),
)


@compiled
def exp(x: Any) -> Any:
    """e^x, at least e^-87; NaN for NaN."""
    y = x
    if y < _SMALLEST:
        y = _SMALLEST
    if y > _LARGEST:
        y = _LARGEST
    n = np.floor(fma(y, _LOG2_E, _HALF))
    r = fma(n, _LN2_LOW, fma(n, _LN2_HIGH, y))
    p = fma(_P0, r, _P1)
    p = fma(p, r, _P2)
    p = fma(p, r, _P3)
    p = fma(p, r, _P4)
    p = fma(p, r, _P5)
    return fma(p, r * r, r + _ONE) * float_of((np.int32(n) + np.int32(127)) << np.int32(23))


@compiled
def rms_norm(x: Any, weight: Any, y: Any, length: Any, eps: Any) -> None:
    """RMSNorm: y = x / sqrt(mean(x²) + eps) * weight."""
    factor = _ONE / np.sqrt(dot(x, x, length) / np.float32(length) + eps)
    source, scale, target = floats(x), floats(weight), floats(y)
    for i in range(length):
        target[i] = source[i] * factor * scale[i]


@compiled
def rms_norm_rows(x: Any, weight: Any, y: Any, rows: Any, length: Any, eps: Any) -> None:
    """RMSNorm of each row: x to y, both (rows, length)."""
    for row in range(rows):
        place = row * length * FLOAT
        rms_norm(x + place, weight, y + place, length, eps)


@compiled
def apply_rope(x: Any, cos: Any, sin: Any, size: Any) -> None:
    """RoPE of one head, in place: x cos + roll(x, size / 2) sin; see rope.Rope."""
    half = size // 2
    head, c, s = floats(x), floats(cos), floats(sin)
    for i in range(half):
        lower, upper = head[i], head[i + half]
        head[i] = fma(upper, s[i], lower * c[i])
        head[i + half] = fma(lower, s[i + half], upper * c[i + half])


@compiled
def norm_and_rope(head: Any, norm: Any, eps: Any, cos: Any, sin: Any, size: Any) -> None:
    """RMSNorm and RoPE of a query or key head, in place. `norm`: address of weights; 0: none."""
    if norm != 0:
        rms_norm(head, norm, head, size, eps)
    apply_rope(head, cos, sin, size)


@compiled
def swiglu(gates: Any, ups: Any, y: Any, length: Any) -> None:
    """SwiGLU: y = silu(gates) * ups."""
    g, u, target = floats(gates), floats(ups), floats(y)
    for i in range(length):
        target[i] = g[i] / (_ONE + exp(-g[i])) * u[i]


@compiled
def store(x: Any, y: Any, length: Any) -> None:
    """y = x."""
    source, target = floats(x), floats(y)
    for i in range(length):
        target[i] = source[i]


@compiled
def attend(
    query: Any, keys: Any, values: Any, y: Any, length: Any, size: Any, scale: Any, scores: Any
) -> None:
    """Attention of one query head over `length` positions: y (size,).

    keys, values: (length, size); `scores`: scratch for length + LANES float32.
    """
    likelihoods = floats(scores)
    for position in range(length):
        key = keys + position * size * FLOAT
        likelihoods[position] = dot(query, key, size) * scale
    whole = (length + LANES - 1) // LANES * LANES
    for position in range(length, whole):
        likelihoods[position] = -np.float32(np.inf)
    most = max_of(scores, whole)
    for position in range(length):
        likelihoods[position] = exp(likelihoods[position] - most)
    for position in range(length, whole):
        likelihoods[position] = _ZERO
    factor = _ONE / sum_of(scores, whole)
    target = floats(y)
    for first in range(0, size, WIDTH):
        place = values + first * FLOAT
        _sum_up(1, y + first * FLOAT, 0, scores, 0, place, size * FLOAT, 0, length, place, 0)
    for i in range(size):
        target[i] = target[i] * factor


@compiled
def attend_group(
    row: Any,
    keys: Any,
    y: Any,
    head: Any,
    heads: Any,
    kv_heads: Any,
    size: Any,
    capacity: Any,
    length: Any,
    scale: Any,
    scores: Any,
) -> None:
    """Append the key and value of one KV head to the cache, then attend with its query heads (GQA).

    row: (heads + 2 kv_heads, size), after RoPE. keys: the KV cache of one sequence and layer,
    (keys and values, kv_heads, capacity, size), with `length` positions before. y: (heads, size).
    """
    head_bytes = size * FLOAT
    head_keys = keys + head * capacity * head_bytes
    values = head_keys + kv_heads * capacity * head_bytes
    store(row + (heads + head) * head_bytes, head_keys + length * head_bytes, size)
    store(row + (heads + kv_heads + head) * head_bytes, values + length * head_bytes, size)
    groups = heads // kv_heads
    for query in range(head * groups, (head + 1) * groups):
        place = query * head_bytes
        attend(row + place, head_keys, values, y + place, length + 1, size, scale, scores)
