"""Fused decode step: the next tokens of several sequences through all layers, in one call.

A row is one token. One task computes the attention of all rows of a sequence for one KV head, in
order: a row attends to the keys and values that the rows before it have appended. Threads divide
the outputs of each GEMM among them, for all rows. Every thread computes RMSNorm and quantization of
all rows itself, which takes less time than another barrier. `layout` describes the arguments.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import layout as p
from .compiling import compiled, entry
from .intrinsics import WIDTH, address_of, call as invoke, floats, words
from .linear import add_outputs, block, convert_rows, multiply, partial_sums_of
from .rowwise import FLOAT, WORD, attend_group, norm_and_rope, rms_norm_rows, swiglu
from .work_stealing import claim, wait_for_all


@compiled
def rope_and_attend(call: Any, number: Any, of: Any, place: Any, head: Any, scratch: Any) -> None:
    """RoPE and attention of the query heads that share KV head `head`, of one row in a layer.

    The row has number `place` among those of sequence `of`.
    """
    c = words(call)
    sequence = words(c[p.SEQUENCES] + of * p.SEQUENCE * WORD)
    row = sequence[p.FIRST] + place
    m = words(c[p.PLAN])
    heads, kv_heads, size = m[p.HEADS], m[p.KV_HEADS], m[p.SIZE]
    constants = floats(m[p.CONSTANTS])
    eps = constants[p.EPS]
    fields = words(c[p.PLAN] + (p.FIRST_LAYER + number * p.LAYER) * WORD)
    head_bytes = size * FLOAT
    cos, sin = c[p.COS] + row * head_bytes, c[p.SIN] + row * head_bytes
    qkv = c[p.QKVS] + row * (heads + 2 * kv_heads) * head_bytes
    norm_and_rope(qkv + (heads + head) * head_bytes, fields[p.KEY_NORM], eps, cos, sin, size)
    groups = heads // kv_heads
    for query in range(head * groups, (head + 1) * groups):
        norm_and_rope(qkv + query * head_bytes, fields[p.QUERY_NORM], eps, cos, sin, size)
    capacity = sequence[p.CAPACITY]
    attend_group(
        qkv,
        sequence[p.KEYS] + number * 2 * kv_heads * capacity * head_bytes,
        c[p.ATTENDED] + row * heads * head_bytes,
        head,
        heads,
        kv_heads,
        size,
        capacity,
        sequence[p.LENGTH] + place,
        constants[p.SCALING],
        scratch,
    )


@compiled
def attend_in_order(call: Any, number: Any, of: Any, head: Any, scratch: Any) -> None:
    """`rope_and_attend` for the rows of one sequence, `of`."""
    sequence = words(words(call)[p.SEQUENCES] + of * p.SEQUENCE * WORD)
    for place in range(sequence[p.COUNT]):
        rope_and_attend(call, number, of, place, head, scratch)


@entry
def step(data: Any) -> None:
    """Entry point: compute the logits of every row and append to the KV cache of its sequence."""
    call = address_of(data)
    c = words(call)
    thread, threads = np.int64(invoke(c[p.THREAD])), np.int64(invoke(c[p.THREADS]))
    m = words(c[p.PLAN])
    rows, hidden, kv_heads, inner = c[p.ROWS], m[p.HIDDEN], m[p.KV_HEADS], m[p.INNER]
    eps = floats(m[p.CONSTANTS])[p.EPS]
    x = c[p.X]
    normed = c[p.PRIVATE] + thread * c[p.PRIVATE_BYTES]
    pairs = normed + rows * hidden * FLOAT  # (rows, 2 WIDTH) outputs
    scratch = pairs + rows * 2 * WIDTH * FLOAT  # for `convert_rows` and attention scores
    claimed = c[p.CLAIMED]
    for number in range(m[p.LAYERS]):
        layer = c[p.PLAN] + (p.FIRST_LAYER + number * p.LAYER) * WORD
        fields = words(layer)
        rms_norm_rows(x, fields[p.ATTENTION_NORM], normed, rows, hidden, eps)
        qkv = layer + p.QKV * WORD
        multiply(qkv, normed, rows, c[p.QKVS], scratch, thread, threads, claimed)
        claimed = wait_for_all(c[p.BARRIER], claimed, threads)
        while True:
            task = claim(c[p.NUM_SEQUENCES] * kv_heads, thread, threads, claimed)
            if task < 0:
                break
            attend_in_order(call, number, task // kv_heads, task % kv_heads, scratch)
        claimed = wait_for_all(c[p.BARRIER], claimed, threads)
        out = layer + p.OUT * WORD
        add_outputs(out, c[p.ATTENDED], rows, x, pairs, scratch, thread, threads, claimed)
        claimed = wait_for_all(c[p.BARRIER], claimed, threads)
        rms_norm_rows(x, fields[p.MLP_NORM], normed, rows, hidden, eps)
        gate_up = layer + p.GATE_UP * WORD
        convert_rows(gate_up, normed, 0, rows, rows, scratch)
        partial = partial_sums_of(gate_up, rows, scratch)
        count = inner // WIDTH
        while True:
            b = claim(count, thread, threads, claimed)
            if b < 0:
                break
            block(gate_up, b, normed, rows, scratch, partial, pairs, 2 * WIDTH * FLOAT)
            ups = pairs + WIDTH * FLOAT
            block(gate_up, b + count, normed, rows, scratch, partial, ups, 2 * WIDTH * FLOAT)
            for row in range(rows):
                pair = pairs + row * 2 * WIDTH * FLOAT
                y = c[p.GATED] + (row * inner + b * WIDTH) * FLOAT
                swiglu(pair, pair + WIDTH * FLOAT, y, WIDTH)
        claimed = wait_for_all(c[p.BARRIER], claimed, threads)
        down = layer + p.DOWN * WORD
        add_outputs(down, c[p.GATED], rows, x, pairs, scratch, thread, threads, claimed)
        claimed = wait_for_all(c[p.BARRIER], claimed, threads)
    rms_norm_rows(x, m[p.NORM], normed, rows, hidden, eps)
    head = c[p.PLAN] + p.HEAD * WORD
    multiply(head, normed, rows, c[p.LOGITS], scratch, thread, threads, claimed)
