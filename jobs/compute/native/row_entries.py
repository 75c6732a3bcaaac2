"""Entry points of the `rowwise` operations for many rows, one call each, for the decoder's prefill.

Each thread computes its share of the rows. A docstring lists the arguments; the assignments give
their order in the words of a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import rowwise as r
from .compiling import entry
from .intrinsics import address_of, call, floats, words
from .rowwise import FLOAT, WORD

SPAN = 5  # words of a span


@entry
def rms_norm(data: Any) -> None:
    """x, y: (rows, length); weight: (length,); eps."""
    c = words(address_of(data))
    thread, threads = np.int64(call(c[0])), np.int64(call(c[1]))
    rows, length, x, weight, y, eps = c[2], c[3], c[4], c[5], c[6], floats(c[7])[0]
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        place = row * length * FLOAT
        r.rms_norm(x + place, weight, y + place, length, eps)


@entry
def norm_and_rope(data: Any) -> None:
    """qkv: (rows, heads + 2 kv_heads, size), in place; cos, sin: (rows, size); weights of the query
    and key norms, or 0; eps.
    """
    c = words(address_of(data))
    thread, threads = np.int64(call(c[0])), np.int64(call(c[1]))
    rows, heads, kv_heads, size = c[2], c[3], c[4], c[5]
    qkv, cos, sin, query_norm, key_norm, eps = c[6], c[7], c[8], c[9], c[10], floats(c[11])[0]
    head_bytes = size * FLOAT
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        first = qkv + row * (heads + 2 * kv_heads) * head_bytes
        place = row * head_bytes
        for head in range(heads + kv_heads):
            norm = query_norm if head < heads else key_norm
            r.norm_and_rope(first + head * head_bytes, norm, eps, cos + place, sin + place, size)


@entry
def swiglu(data: Any) -> None:
    """gates_and_ups: (rows, 2 length); y: (rows, length)."""
    c = words(address_of(data))
    thread, threads = np.int64(call(c[0])), np.int64(call(c[1]))
    rows, length, gates_and_ups, y = c[2], c[3], c[4], c[5]
    for row in range(rows * thread // threads, rows * (thread + 1) // threads):
        gates = gates_and_ups + 2 * row * length * FLOAT
        r.swiglu(gates, gates + length * FLOAT, y + row * length * FLOAT, length)


@entry
def attend(data: Any) -> None:
    """qkv: (rows, heads + 2 kv_heads, size); y: (rows, heads, size); a layer; spans; scratch.

    A span is consecutive tokens of one sequence, each of which attends to those before it: its
    first row; the address of its sequence's KV cache of all layers; its capacity; its length before
    the span; the number of rows.
    """
    c = words(address_of(data))
    thread, threads = np.int64(call(c[0])), np.int64(call(c[1]))
    spans, heads, kv_heads, size, layer = c[2], c[3], c[4], c[5], c[6]
    qkv, y, span_words, scratch, scratch_bytes, scale = (
        c[7],
        c[8],
        c[9],
        c[10],
        c[11],
        floats(c[12])[0],
    )
    head_bytes = size * FLOAT
    tasks = spans * kv_heads
    for task in range(tasks * thread // threads, tasks * (thread + 1) // threads):
        span = words(span_words + task // kv_heads * SPAN * WORD)
        first, keys, capacity, length, count = span[0], span[1], span[2], span[3], span[4]
        for place in range(count):
            row = first + place
            r.attend_group(
                qkv + row * (heads + 2 * kv_heads) * head_bytes,
                keys + layer * 2 * kv_heads * capacity * head_bytes,
                y + row * heads * head_bytes,
                task % kv_heads,
                heads,
                kv_heads,
                size,
                capacity,
                length + place,
                scale,
                scratch + thread * scratch_bytes,
            )
