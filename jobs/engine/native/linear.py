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
from .shares import take
from .sums import BFLOAT16, FETCHED, FLOAT32, INT8, products
from .vectors import (
    HAS_PAIRS,
    HAS_QUADS,
    WIDTH,
    address_of,
    bits_of,
    call as invoke,
    float_of,
    floats,
    fma,
    ints,
    shorts,
    unsigned,
    widest,
    words,
)

_UNITS = np.float32(127)  # of the largest of a row: products.Int8Linear, the same to the bit
_OFFSET = np.float32(128.5)
_ONE, _TINY = np.float32(1), np.float32(1e-10)
_ZERO_POINT = np.int32(128)
_UPPER, _BELOW_HALF, _LAST, _NAN = map(np.int32, (16, 0x7FFF, 1, 0x7FC0))

GROUP = 6  # rows that are computed at once: their sums, 64 of each, take 24 of 32 registers
_floats, _pairs = products(FLOAT32, WIDTH, GROUP), products(BFLOAT16, WIDTH, GROUP)
_quads, _half_quads = (products(INT8, panel, GROUP) for panel in (WIDTH, WIDTH // 2))


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
    fields = words(linear)
    form, length, run, panel = fields[p.FORM], fields[p.INPUTS], fields[p.RUN], fields[p.PANEL]
    size = FLOAT if form == p.FLOATS else 2 if form == p.PAIRS else 1
    first = number * WIDTH
    source, x_stride = x if form == p.FLOATS else scratch + rows * WIDTH, length * size
    more = rest_of(linear, rows, scratch)
    groups = (rows + GROUP - 1) // GROUP
    # The first group waits for the weights, the others for the processor. So all of them fetch
    # what follows, a half each in turns; one alone is as fast as the memory as it is.
    fetched = FETCHED if groups > 1 else 0
    for begin in range(0, length, run):
        end = min(begin + run, length)
        half_of_it = (end - begin) * panel * size // 2
        for column in range(0, WIDTH, panel):
            w = fields[p.WEIGHT] + (first + column) * length * size
            following = w + end * panel * size
            for group in range(groups):
                row = rows * group // groups
                count = rows * (group + 1) // groups - row
                place = y + row * y_stride + column * FLOAT
                target, target_stride = (more, panel * FLOAT) if begin else (place, y_stride)
                _products(
                    form, panel, count, target, target_stride, source + row * x_stride, x_stride,
                    w, begin, end, following + group % 2 * half_of_it, fetched,
                )  # fmt: skip
                if begin:
                    _add(place, y_stride, more, count, panel)
    for row in range(rows):
        _finish(linear, first, floats(scratch)[row], y + row * y_stride)


@compiled
def _add(y: Any, y_stride: Any, more: Any, rows: Any, panel: Any) -> None:
    """y (rows, panel) += more."""
    for row in range(rows):
        target, added = floats(y + row * y_stride), floats(more + row * panel * FLOAT)
        for i in range(panel):
            target[i] += added[i]


@compiled
def rest_of(linear: Any, rows: Any, scratch: Any) -> Any:
    """Where scratch is free behind prepared rows."""
    fields = words(linear)
    size = 0 if fields[p.FORM] == p.FLOATS else 2
    return scratch + rows * WIDTH + rows * fields[p.INPUTS] * size


@compiled
def _products(
    form: Any, panel: Any, count: Any, y: Any, y_stride: Any, x: Any, x_stride: Any,
    w: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
) -> None:  # fmt: skip
    """The sums of up to GROUP rows with a panel, from inputs `begin` to `end`."""
    stride = panel * FLOAT
    if form == p.FLOATS:
        _floats(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_PAIRS and form == p.PAIRS:
        _pairs(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_QUADS and form == p.QUADS and panel == WIDTH:
        _quads(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_QUADS and form == p.QUADS and panel != WIDTH:
        _half_quads(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)


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
def multiply(
    linear: Any, x: Any, rows: Any, y: Any, scratch: Any, thread: Any, threads: Any, taken: Any
) -> None:
    """Compute those of a layer's outputs y (rows, outputs) that this thread takes."""
    prepare(linear, x, rows, scratch)
    outputs = words(linear)[p.OUTPUTS]
    while True:
        b = take(outputs // WIDTH, thread, threads, taken)
        if b < 0:
            break
        block(linear, b, x, rows, scratch, y + b * WIDTH * FLOAT, outputs * FLOAT)


@compiled
def add_product(
    linear: Any, source: Any, rows: Any, x: Any, y: Any, scratch: Any,
    thread: Any, threads: Any, taken: Any,
) -> None:  # fmt: skip
    """x += those of a layer's outputs that this thread takes. y: room for (rows, WIDTH)."""
    prepare(linear, source, rows, scratch)
    outputs = words(linear)[p.OUTPUTS]
    while True:
        b = take(outputs // WIDTH, thread, threads, taken)
        if b < 0:
            break
        block(linear, b, source, rows, scratch, y, WIDTH * FLOAT)
        for row in range(rows):
            target = floats(x + (row * outputs + b * WIDTH) * FLOAT)
            added = floats(y + row * WIDTH * FLOAT)
            for i in range(WIDTH):
                target[i] = target[i] + added[i]


@entry
def product(data: Any) -> None:
    """A linear layer's outputs (rows, outputs) of x (rows, inputs).

    Given: layer, x, rows, outputs; the first thread's scratch, and the bytes to the next one's;
    what is taken: zeros, a word for each thread.
    """
    c = words(address_of(data))
    thread, threads = np.int64(invoke(c[p.THREAD])), np.int64(invoke(c[p.THREADS]))
    multiply(c[2], c[3], c[4], c[5], c[6] + thread * c[7], thread, threads, c[8])
