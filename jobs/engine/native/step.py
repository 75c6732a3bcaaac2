"""One token of a few sequences through all layers: one call, for every thread of a team.

Each thread computes its share of a product's outputs, for all rows, and the row that goes into it
for itself: that takes less time than to wait for another thread's. `call` is what `plan` says.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import plan as p
from .compiling import compiled, entry
from .rows import FLOAT, WORD, attend_group, gate, normalise, turn
from .vectors import (
    HAS_QUADS,
    WIDTH,
    address_of,
    call as invoke,
    columns,
    floats,
    fma,
    ints,
    quads,
    unsigned,
    widest,
    words,
)

_UNITS = np.float32(127)  # of the largest of a row: products.Int8Linear, the same to the bit
_OFFSET = np.float32(128.5)
_ONE, _TINY = np.float32(1), np.float32(1e-10)
_ZERO_POINT = 128

_columns_1, _columns_2, _columns_4 = columns(1), columns(2), columns(4)
_quads_1, _quads_2, _quads_4 = quads(1, WIDTH), quads(2, WIDTH), quads(4, WIDTH)
_half_quads = quads(1, WIDTH // 2)


@compiled
def integers(x: Any, y: Any, length: Any) -> Any:
    """A row in 8 bits, as Int8Linear's; return its largest absolute value."""
    source, target = floats(x), unsigned(y)
    most = widest(x, length)
    if most < _TINY:
        most = _TINY
    unit = _ONE / most * _UNITS
    for i in range(length):
        target[i] = np.uint8(np.int32(fma(source[i], unit, _OFFSET)))
    return most


@compiled
def prepare(linear: Any, x: Any, rows: Any, scratch: Any) -> None:
    """Make of rows (rows, inputs) what `block` reads: `scratch`, where the form asks for it."""
    fields = words(linear)
    if fields[p.FORM] != p.FLOATS:
        length = fields[p.INPUTS]
        units = floats(scratch)
        for row in range(rows):
            place = scratch + rows * WIDTH + row * length
            units[row] = integers(x + row * length * FLOAT, place, length)


@compiled
def block(linear: Any, number: Any, x: Any, rows: Any, scratch: Any, y: Any, y_stride: Any) -> None:
    """Compute WIDTH outputs of all rows, from WIDTH * number on. `scratch`: as prepared.

    y: room for the outputs of the first row; of the next ones, y_stride bytes behind each other.
    """
    row = 0
    while row < rows:
        left = rows - row
        count = 4 if left >= 4 else 2 if left >= 2 else 1
        block_of(linear, number, x, row, count, rows, scratch, y + row * y_stride, y_stride)
        row += count


@compiled
def block_of(
    linear: Any, number: Any, x: Any, row: Any, count: Any, rows: Any, scratch: Any,
    y: Any, y_stride: Any,
) -> None:  # fmt: skip
    """The same of 1, 2 or 4 rows, whose weights are read once."""
    fields = words(linear)
    length = fields[p.INPUTS]
    first = number * WIDTH
    bias = floats(fields[p.BIAS] + first * FLOAT)
    if HAS_QUADS and fields[p.FORM] != p.FLOATS:
        integer, w = scratch + rows * WIDTH + row * length, fields[p.WEIGHT] + first * length
        if fields[p.FORM] == p.HALF_QUADS:
            half = WIDTH // 2
            for place, more in ((y, w), (y + half * FLOAT, w + half * length)):
                for r in range(count):
                    _half_quads(place + r * y_stride, 0, integer + r * length, 0, more, length)
        elif count == 4:
            _quads_4(y, y_stride, integer, length, w, length)
        elif count == 2:
            _quads_2(y, y_stride, integer, length, w, length)
        else:
            _quads_1(y, y_stride, integer, length, w, length)
        offsets = ints(fields[p.SUMS] + first * FLOAT)
        scale = floats(fields[p.SCALE] + first * FLOAT)
        for r in range(count):
            products, target = ints(y + r * y_stride), floats(y + r * y_stride)
            unit = floats(scratch)[row + r]
            if fields[p.BIAS] == 0:
                for i in range(WIDTH):
                    whole = products[i] + np.int32(_ZERO_POINT) * offsets[i]
                    target[i] = np.float32(whole) * scale[i] * unit
            else:
                for i in range(WIDTH):
                    whole = products[i] + np.int32(_ZERO_POINT) * offsets[i]
                    target[i] = fma(np.float32(whole) * scale[i], unit, bias[i])
        return
    x_stride = length * FLOAT
    x += row * x_stride
    w = fields[p.WEIGHT] + first * x_stride
    run = fields[p.RUN]
    more, more_stride = scratch + rows * WIDTH, WIDTH * FLOAT
    for begin in range(0, length, run):
        end = min(begin + run, length)
        place, stride = (y, y_stride) if begin == 0 else (more, more_stride)
        if count == 4:
            _columns_4(place, stride, x, x_stride, w, WIDTH, begin, end)
        elif count == 2:
            _columns_2(place, stride, x, x_stride, w, WIDTH, begin, end)
        else:
            _columns_1(place, stride, x, x_stride, w, WIDTH, begin, end)
        if begin > 0:
            for r in range(count):
                target, added = floats(y + r * y_stride), floats(more + r * more_stride)
                for i in range(WIDTH):
                    target[i] += added[i]
    if fields[p.BIAS] != 0:
        for r in range(count):
            target = floats(y + r * y_stride)
            for i in range(WIDTH):
                target[i] += bias[i]


@compiled
def turn_and_attend(call: Any, number: Any, row: Any, head: Any, scratch: Any) -> None:
    """Attention of those query heads of a row that share a key head, in a layer."""
    c = words(call)
    m = words(c[p.PLAN])
    heads, kv_heads, size = m[p.HEADS], m[p.KV_HEADS], m[p.SIZE]
    constants = floats(m[p.CONSTANTS])
    eps = constants[p.EPS]
    fields = words(c[p.PLAN] + (p.FIRST_LAYER + number * p.LAYER) * WORD)
    head_bytes = size * FLOAT
    cos, sin = c[p.COS] + row * head_bytes, c[p.SIN] + row * head_bytes
    qkv = c[p.QKVS] + row * (heads + 2 * kv_heads) * head_bytes
    turn(qkv + (heads + head) * head_bytes, fields[p.KEY_NORM], eps, cos, sin, size)
    groups = heads // kv_heads
    for query in range(head * groups, (head + 1) * groups):
        turn(qkv + query * head_bytes, fields[p.QUERY_NORM], eps, cos, sin, size)
    sequence = words(c[p.SEQUENCES] + row * p.SEQUENCE * WORD)
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
        sequence[p.LENGTH],
        constants[p.SCALING],
        scratch,
    )


@compiled
def add_product(
    linear: Any, source: Any, x: Any, rows: Any, thread: Any, threads: Any, scratch: Any, y: Any
) -> None:
    """x += this thread's outputs of a linear layer. y: room for (rows, WIDTH)."""
    prepare(linear, source, rows, scratch)
    outputs = words(linear)[p.OUTPUTS]
    count = outputs // WIDTH
    for b in range(count * thread // threads, count * (thread + 1) // threads):
        block(linear, b, source, rows, scratch, y, WIDTH * FLOAT)
        for row in range(rows):
            target = floats(x + (row * outputs + b * WIDTH) * FLOAT)
            added = floats(y + row * WIDTH * FLOAT)
            for i in range(WIDTH):
                target[i] = target[i] + added[i]


@entry
def product(data: Any) -> None:
    """A linear layer's outputs (rows, outputs) of x (rows, inputs), on one thread."""
    c = words(address_of(data))
    linear, x, rows, y, scratch = c[2], c[3], c[4], c[5], c[6]
    prepare(linear, x, rows, scratch)
    outputs = words(linear)[p.OUTPUTS]
    for b in range(outputs // WIDTH):
        block(linear, b, x, rows, scratch, y + b * WIDTH * FLOAT, outputs * FLOAT)


@entry
def step(data: Any) -> None:
    """Compute the logits of every row; its keys and values are put behind those of its sequence."""
    call = address_of(data)
    c = words(call)
    thread, threads = np.int64(invoke(c[p.THREAD])), np.int64(invoke(c[p.THREADS]))
    m = words(c[p.PLAN])
    rows, hidden, heads, kv_heads, size = (
        c[p.ROWS],
        m[p.HIDDEN],
        m[p.HEADS],
        m[p.KV_HEADS],
        m[p.SIZE],
    )
    inner, eps = m[p.INNER], floats(m[p.CONSTANTS])[p.EPS]
    x = c[p.X]
    normed = c[p.PRIVATE] + thread * c[p.PRIVATE_BYTES]
    pairs = normed + rows * hidden * FLOAT  # (rows, 2 WIDTH) outputs
    scratch = pairs + rows * 2 * WIDTH * FLOAT  # of `prepare`, and scores of attention
    wide = (heads + 2 * kv_heads) * size
    for number in range(m[p.LAYERS]):
        layer = c[p.PLAN] + (p.FIRST_LAYER + number * p.LAYER) * WORD
        fields = words(layer)
        for row in range(rows):
            place = row * hidden * FLOAT
            normalise(x + place, fields[p.ATTENTION_NORM], normed + place, hidden, eps)
        qkv = layer + p.QKV * WORD
        prepare(qkv, normed, rows, scratch)
        count = wide // WIDTH
        for b in range(count * thread // threads, count * (thread + 1) // threads):
            y = c[p.QKVS] + b * WIDTH * FLOAT
            block(qkv, b, normed, rows, scratch, y, wide * FLOAT)
        invoke(c[p.BARRIER])
        count = rows * kv_heads
        for task in range(count * thread // threads, count * (thread + 1) // threads):
            turn_and_attend(call, number, task // kv_heads, task % kv_heads, scratch)
        invoke(c[p.BARRIER])
        add_product(layer + p.OUT * WORD, c[p.ATTENDED], x, rows, thread, threads, scratch, pairs)
        invoke(c[p.BARRIER])
        for row in range(rows):
            place = row * hidden * FLOAT
            normalise(x + place, fields[p.MLP_NORM], normed + place, hidden, eps)
        gate_up = layer + p.GATE_UP * WORD
        prepare(gate_up, normed, rows, scratch)
        count = inner // WIDTH
        for b in range(count * thread // threads, count * (thread + 1) // threads):
            block(gate_up, b, normed, rows, scratch, pairs, 2 * WIDTH * FLOAT)
            block(
                gate_up, b + count, normed, rows, scratch, pairs + WIDTH * FLOAT, 2 * WIDTH * FLOAT
            )
            for row in range(rows):
                pair = pairs + row * 2 * WIDTH * FLOAT
                y = c[p.GATED] + (row * inner + b * WIDTH) * FLOAT
                gate(pair, pair + WIDTH * FLOAT, y, WIDTH)
        invoke(c[p.BARRIER])
        add_product(layer + p.DOWN * WORD, c[p.GATED], x, rows, thread, threads, scratch, pairs)
        invoke(c[p.BARRIER])
    for row in range(rows):
        place = row * hidden * FLOAT
        normalise(x + place, m[p.NORM], normed + place, hidden, eps)
    head = c[p.PLAN] + p.HEAD * WORD
    prepare(head, normed, rows, scratch)
    vocabulary = words(head)[p.OUTPUTS]
    count = vocabulary // WIDTH
    for b in range(count * thread // threads, count * (thread + 1) // threads):
        y = c[p.LOGITS] + b * WIDTH * FLOAT
        block(head, b, normed, rows, scratch, y, vocabulary * FLOAT)
