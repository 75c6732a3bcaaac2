"""Linear layers of a few rows, on weights as oneDNN packed them.

WIDTH outputs at a time, a block, whose weights lie one behind the other: a thread that computes
blocks in a row reads one stream. The sums are oneDNN's to the bit: of RUN inputs, added to that of
those before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import plan as p
from .compiling import compiled, entry
from .rows import FLOAT
from .vectors import (
    HAS_PAIRS,
    HAS_QUADS,
    WIDTH,
    address_of,
    bits_of,
    columns,
    float_of,
    floats,
    fma,
    ints,
    pairs,
    quads,
    shorts,
    unsigned,
    widest,
    words,
)

_UNITS = np.float32(127)  # of the largest of a row: products.Int8Linear, the same to the bit
_OFFSET = np.float32(128.5)
_ONE, _TINY = np.float32(1), np.float32(1e-10)
_ZERO_POINT = np.int32(128)
_HALF_WIDTH = WIDTH // 2
_UPPER, _BELOW_HALF, _LAST, _NAN = map(np.int32, (16, 0x7FFF, 1, 0x7FC0))

_columns_1, _columns_2, _columns_3, _columns_4 = map(columns, range(1, 5))
_pairs_1, _pairs_2, _pairs_3, _pairs_4 = map(pairs, range(1, 5))
_quads_1, _quads_2, _quads_3, _quads_4 = (quads(count, WIDTH) for count in range(1, 5))
_half_quads = quads(1, _HALF_WIDTH)


@compiled
def half(x: Any) -> Any:
    """The bits of a float32 rounded to bfloat16, ties to even."""
    if x != x:
        return _NAN
    bits = bits_of(x)
    return (bits + _BELOW_HALF + ((bits >> _UPPER) & _LAST)) >> _UPPER


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
    """Bring rows (rows, inputs) to `scratch` in the form that the layer takes, if not float32.

    There is room for WIDTH bytes a row, where 8-bit rows have their unit, and for the rows.
    """
    fields = words(linear)
    length = fields[p.INPUTS]
    place = scratch + rows * WIDTH
    if fields[p.FORM] == p.PAIRS:
        source, target = floats(x), shorts(place)
        for i in range(rows * length):
            target[i] = np.uint16(half(source[i]))
    elif fields[p.FORM] != p.FLOATS:
        units = floats(scratch)
        for row in range(rows):
            units[row] = integers(x + row * length * FLOAT, place + row * length, length)


@compiled
def block(linear: Any, number: Any, x: Any, rows: Any, scratch: Any, y: Any, y_stride: Any) -> None:
    """Compute WIDTH outputs of all rows, from WIDTH * number on. `scratch`: as prepared.

    y: room for the outputs of the first row; of the next ones, y_stride bytes behind each other.
    """
    for row in range(0, rows, 4):
        count = min(rows - row, 4)
        _block_of(linear, number, x, row, count, rows, scratch, y + row * y_stride, y_stride)


@compiled
def _block_of(
    linear: Any, number: Any, x: Any, row: Any, count: Any, rows: Any, scratch: Any,
    y: Any, y_stride: Any,
) -> None:  # fmt: skip
    """The same of up to four rows, whose weights are read once."""
    fields = words(linear)
    form, length = fields[p.FORM], fields[p.INPUTS]
    size = FLOAT if form == p.FLOATS else 2 if form == p.PAIRS else 1
    first = number * WIDTH
    w = fields[p.WEIGHT] + first * length * size
    x_stride = length * size
    source = (x if form == p.FLOATS else scratch + rows * WIDTH) + row * x_stride
    _products(form, count, y, y_stride, source, x_stride, w, 0, min(fields[p.RUN], length))
    for begin in range(fields[p.RUN], length, fields[p.RUN]):
        end = min(begin + fields[p.RUN], length)
        more = rest_of(linear, rows, scratch)
        _products(form, count, more, WIDTH * FLOAT, source, x_stride, w, begin, end)
        for r in range(count):
            target, added = floats(y + r * y_stride), floats(more + r * WIDTH * FLOAT)
            for i in range(WIDTH):
                target[i] += added[i]
    for r in range(count):
        _finish(linear, first, floats(scratch)[row + r], y + r * y_stride)


@compiled
def rest_of(linear: Any, rows: Any, scratch: Any) -> Any:
    """Where scratch is free behind prepared rows."""
    fields = words(linear)
    size = 0 if fields[p.FORM] == p.FLOATS else 2
    return scratch + rows * WIDTH + rows * fields[p.INPUTS] * size


@compiled
def _products(
    form: Any,
    count: Any,
    y: Any,
    y_stride: Any,
    x: Any,
    x_stride: Any,
    w: Any,
    begin: Any,
    end: Any,
) -> None:
    if form == p.FLOATS:
        if count == 4:
            _columns_4(y, y_stride, x, x_stride, w, WIDTH, begin, end)
        elif count == 3:
            _columns_3(y, y_stride, x, x_stride, w, WIDTH, begin, end)
        elif count == 2:
            _columns_2(y, y_stride, x, x_stride, w, WIDTH, begin, end)
        else:
            _columns_1(y, y_stride, x, x_stride, w, WIDTH, begin, end)
    if HAS_PAIRS and form == p.PAIRS:
        if count == 4:
            _pairs_4(y, y_stride, x, x_stride, w, begin, end)
        elif count == 3:
            _pairs_3(y, y_stride, x, x_stride, w, begin, end)
        elif count == 2:
            _pairs_2(y, y_stride, x, x_stride, w, begin, end)
        else:
            _pairs_1(y, y_stride, x, x_stride, w, begin, end)
    if HAS_QUADS and form == p.QUADS:
        if count == 4:
            _quads_4(y, y_stride, x, x_stride, w, begin, end)
        elif count == 3:
            _quads_3(y, y_stride, x, x_stride, w, begin, end)
        elif count == 2:
            _quads_2(y, y_stride, x, x_stride, w, begin, end)
        else:
            _quads_1(y, y_stride, x, x_stride, w, begin, end)
    if HAS_QUADS and form == p.HALF_QUADS:
        for r in range(count):
            place, row = y + r * y_stride, x + r * x_stride
            _half_quads(place, 0, row, 0, w, begin, end)
            upper, of_upper = place + _HALF_WIDTH * FLOAT, w + _HALF_WIDTH * end
            _half_quads(upper, 0, row, 0, of_upper, begin, end)


@compiled
def _finish(linear: Any, first: Any, unit: Any, y: Any) -> None:
    """Make outputs of sums: by their scales, with the bias, rounded."""
    fields = words(linear)
    form = fields[p.FORM]
    has_bias = fields[p.BIAS] != 0
    target, bias = floats(y), floats(fields[p.BIAS] + first * FLOAT)
    if form == p.FLOATS or form == p.PAIRS:
        if has_bias:
            for i in range(WIDTH):
                target[i] += bias[i]
        if form == p.PAIRS:
            for i in range(WIDTH):
                target[i] = float_of(half(target[i]) << _UPPER)
        return
    sums, offsets = ints(y), ints(fields[p.SUMS] + first * FLOAT)
    scale = floats(fields[p.SCALE] + first * FLOAT)
    if has_bias:
        for i in range(WIDTH):
            product = np.float32(sums[i] + _ZERO_POINT * offsets[i]) * scale[i]
            target[i] = fma(product, unit, bias[i])
    else:
        for i in range(WIDTH):
            target[i] = np.float32(sums[i] + _ZERO_POINT * offsets[i]) * scale[i] * unit


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
