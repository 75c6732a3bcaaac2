"""Linear layers on packed weights: y = x W^T + b, in blocks of WIDTH outputs that threads share.

The weights of a block lie one behind the other, so a thread that computes blocks in a row reads one
stream. float32 sums are oneDNN's to the bit: of RUN inputs, added to that of those before. Sums of
int8 are exact, and so the same on every processor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import layout as p
from .compiling import compiled, entry
from .gemm import (
    DOT_BFLOAT16,
    DOT_INT8,
    FLOAT32,
    GROUP,
    WIDENED_BFLOAT16,
    WIDENED_INT8,
    gemm,
)
from .intrinsics import (
    HAS_AVX2,
    HAS_AVX512,
    HAS_AVX_VNNI,
    HAS_BFLOAT16,
    HAS_VNNI,
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
from .rowwise import FLOAT
from .work_stealing import take

_UNITS = np.float32(127)  # of the largest of a row: quantized.Int8Linear, the same to the bit
_OFFSET = np.float32(128.5)
_ONE, _TINY = np.float32(1), np.float32(1e-10)
_ZERO_POINT = np.int32(128)
_UPPER, _BELOW_HALF, _LAST, _NAN = map(np.int32, (16, 0x7FFF, 1, 0x7FC0))

# What follows is prefetched: for one group of rows so many bytes ahead in the same stream (0:
# nothing, which on AVX-512 was as fast), for several the next panel, a part by each group.
_AHEAD = 0 if HAS_AVX512 else 1024
_CACHED_BYTES = 2**17  # half of the smallest second-level cache that processors with AVX2 have

FLOATS_PANEL, PAIRS_PANEL, WIDENED_PAIRS_PANEL, QUADS_PANEL, WIDENED_QUADS_PANEL = (
    kind.panel for kind in (FLOAT32, DOT_BFLOAT16, WIDENED_BFLOAT16, DOT_INT8, WIDENED_INT8)
)
_floats, _pairs = gemm(FLOAT32, FLOATS_PANEL), gemm(DOT_BFLOAT16, PAIRS_PANEL)
_quads, _half_quads = (gemm(DOT_INT8, panel) for panel in (QUADS_PANEL, QUADS_PANEL // 2))
_widened_pairs = gemm(WIDENED_BFLOAT16, WIDENED_PAIRS_PANEL)
_widened_quads = gemm(WIDENED_INT8, WIDENED_QUADS_PANEL)
_HAS_QUADS = HAS_VNNI or HAS_AVX_VNNI


@compiled
def half(x: Any) -> Any:
    """The bits of a float32 rounded to bfloat16, ties to even."""
    if x != x:
        return _NAN
    bits = bits_of(x)
    return (bits + _BELOW_HALF + ((bits >> _UPPER) & _LAST)) >> _UPPER


@compiled
def unit_of(x: Any, length: Any) -> Any:
    """The largest absolute value of a row, and no zero; quantized.Int8Linear's, to the bit."""
    most = widest(x, length)
    if most < _TINY:  # NaN stays
        most = _TINY
    return most


@compiled
def prepare(linear: Any, x: Any, begin: Any, end: Any, rows: Any, scratch: Any) -> None:
    """Bring rows from `begin` to `end` of x (rows, inputs) to `scratch` in the layer's form.

    There is room for WIDTH bytes a row, where quantized rows have their unit, and for the rows.
    float32 rows stay where they are.
    """
    fields = words(linear)
    form, length = fields[p.FORM], fields[p.INPUTS]
    first = scratch + rows * WIDTH
    for row in range(begin, end):
        source = floats(x + row * length * FLOAT)
        if form == p.PAIRS:
            target = shorts(first + row * length * 2)
            for i in range(length):
                target[i] = np.uint16(half(source[i]))
        if form == p.QUADS or form == p.WIDENED_QUADS:
            most = unit_of(x + row * length * FLOAT, length)
            floats(scratch)[row] = most
            unit = _ONE / most * _UNITS
            if form == p.QUADS:
                bytes_of = unsigned(first + row * length)
                for i in range(length):
                    bytes_of[i] = np.uint8(np.int32(fma(source[i], unit, _OFFSET)))
            else:
                shorts_of = shorts(first + row * length * 2)
                for i in range(length):
                    signed = np.int32(fma(source[i], unit, _OFFSET)) - _ZERO_POINT
                    shorts_of[i] = np.uint16(signed)


@compiled
def is_prepared(linear: Any) -> Any:
    """Whether a layer takes rows in another form than float32."""
    form = words(linear)[p.FORM]
    return form != p.FLOATS and form != p.WIDENED_PAIRS


@compiled
def row_bytes(linear: Any) -> Any:
    """The bytes of a row in the form that a layer takes."""
    fields = words(linear)
    form = fields[p.FORM]
    if form == p.QUADS:
        return fields[p.INPUTS]
    if form == p.PAIRS or form == p.WIDENED_QUADS:
        return 2 * fields[p.INPUTS]
    return FLOAT * fields[p.INPUTS]


@compiled
def _block_of_rows(
    linear: Any, number: Any, x: Any, rows: Any, more: Any, y: Any, y_stride: Any
) -> None:
    """The sums of a block for rows that are prepared, at x."""
    fields = words(linear)
    form, length, run, panel = fields[p.FORM], fields[p.INPUTS], fields[p.RUN], fields[p.PANEL]
    first = number * WIDTH
    weight_bytes, x_stride = _weight_bytes(form), row_bytes(linear)
    groups = (rows + GROUP - 1) // GROUP
    step_bytes = panel * FLOAT
    for begin in range(0, length, run):
        end = min(begin + run, length)
        fetched = step_bytes // groups if groups > 1 or _AHEAD else 0
        for column in range(0, WIDTH, panel):
            w = fields[p.WEIGHT] + (first + column) * length * weight_bytes
            here, following = w + begin * panel * weight_bytes, w + end * panel * weight_bytes
            for group in range(groups):
                row = rows * group // groups
                count = rows * (group + 1) // groups - row
                ahead = following + (following - here) * group // groups
                if groups == 1 and _AHEAD:
                    ahead = here + _AHEAD
                place = y + row * y_stride + column * FLOAT
                target, target_stride = (more, panel * FLOAT) if begin else (place, y_stride)
                _multiply_panel(
                    form, panel, count, target, target_stride, x + row * x_stride, x_stride,
                    w, begin, end, ahead, fetched,
                )  # fmt: skip
                if begin:
                    _add(place, y_stride, more, count, panel)


@compiled
def block(
    linear: Any, number: Any, x: Any, rows: Any, scratch: Any, more: Any, y: Any, y_stride: Any
) -> None:
    """Compute WIDTH outputs of all rows, from WIDTH * number on.

    `scratch`: as prepared; `more`: room for (rows, WIDTH) sums. y: room for the outputs of the
    first row; of the next ones, y_stride bytes behind each other.
    """
    fields = words(linear)
    source = scratch + rows * WIDTH if is_prepared(linear) else x
    stride = row_bytes(linear)
    # A block of narrow panels reads the rows once for each: so many at a time stay in the cache.
    most = rows
    if fields[p.PANEL] < WIDTH:
        most = max(GROUP, _CACHED_BYTES // stride // GROUP * GROUP)
    for row in range(0, rows, most):
        count = min(most, rows - row)
        _block_of_rows(
            linear, number, source + row * stride, count, more, y + row * y_stride, y_stride
        )
    for row in range(rows):
        _finish(linear, number * WIDTH, floats(scratch)[row], y + row * y_stride)


@compiled
def _weight_bytes(form: Any) -> Any:
    if form == p.FLOATS:
        return 4
    if form == p.PAIRS or form == p.WIDENED_PAIRS:
        return 2
    return 1


@compiled
def _add(y: Any, y_stride: Any, more: Any, rows: Any, panel: Any) -> None:
    """y (rows, panel) += more."""
    for row in range(rows):
        target, added = floats(y + row * y_stride), floats(more + row * panel * FLOAT)
        for i in range(panel):
            target[i] += added[i]


@compiled
def _multiply_panel(
    form: Any, panel: Any, count: Any, y: Any, y_stride: Any, x: Any, x_stride: Any,
    w: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
) -> None:  # fmt: skip
    """The sums of up to GROUP rows with a panel, from inputs `begin` to `end`."""
    stride = panel * FLOAT
    if form == p.FLOATS:
        _floats(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if form == p.WIDENED_PAIRS:
        _widened_pairs(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_AVX2 and form == p.WIDENED_QUADS:
        _widened_quads(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_BFLOAT16 and form == p.PAIRS:
        _pairs(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if _HAS_QUADS and form == p.QUADS and panel == QUADS_PANEL:
        _quads(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if _HAS_QUADS and form == p.QUADS and panel != QUADS_PANEL:
        _half_quads(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)


@compiled
def _finish(linear: Any, first: Any, unit: Any, y: Any) -> None:
    """Make outputs of sums: by their scales, with the bias, rounded."""
    fields = words(linear)
    form = fields[p.FORM]
    has_bias = fields[p.BIAS] != 0
    target, bias = floats(y), floats(fields[p.BIAS] + first * FLOAT)
    if form != p.QUADS and form != p.WIDENED_QUADS:
        if has_bias:
            for i in range(WIDTH):
                target[i] += bias[i]
        if form == p.PAIRS:
            for i in range(WIDTH):
                target[i] = float_of(half(target[i]) << _UPPER)
        return
    sums, offsets = ints(y), ints(fields[p.SUMS] + first * FLOAT)
    if form == p.QUADS:
        for i in range(WIDTH):
            sums[i] += _ZERO_POINT * offsets[i]
    scale = floats(fields[p.SCALE] + first * FLOAT)
    if has_bias:
        for i in range(WIDTH):
            product = np.float32(sums[i]) * scale[i]
            target[i] = fma(product, unit, bias[i])
    else:
        for i in range(WIDTH):
            target[i] = np.float32(sums[i]) * scale[i] * unit


@compiled
def multiply_prepared(
    linear: Any, x: Any, rows: Any, y: Any, scratch: Any, more: Any,
    thread: Any, threads: Any, taken: Any,
) -> None:  # fmt: skip
    """Compute those of a layer's outputs y (rows, outputs) that this thread takes."""
    outputs = words(linear)[p.OUTPUTS]
    while True:
        b = take(outputs // WIDTH, thread, threads, taken)
        if b < 0:
            break
        block(linear, b, x, rows, scratch, more, y + b * WIDTH * FLOAT, outputs * FLOAT)


@compiled
def more_of(linear: Any, rows: Any, scratch: Any) -> Any:
    """Where scratch is free behind prepared rows."""
    size = 2 if is_prepared(linear) else 0
    return scratch + rows * WIDTH + rows * words(linear)[p.INPUTS] * size


@compiled
def multiply(
    linear: Any, x: Any, rows: Any, y: Any, scratch: Any, thread: Any, threads: Any, taken: Any
) -> None:
    """Prepare all rows in this thread's own scratch; compute the outputs that it takes."""
    prepare(linear, x, 0, rows, rows, scratch)
    more = more_of(linear, rows, scratch)
    multiply_prepared(linear, x, rows, y, scratch, more, thread, threads, taken)


@compiled
def add_product(
    linear: Any, source: Any, rows: Any, x: Any, y: Any, scratch: Any,
    thread: Any, threads: Any, taken: Any,
) -> None:  # fmt: skip
    """x += those of a layer's outputs that this thread takes. y: room for (rows, WIDTH)."""
    prepare(linear, source, 0, rows, rows, scratch)
    more = more_of(linear, rows, scratch)
    outputs = words(linear)[p.OUTPUTS]
    while True:
        b = take(outputs // WIDTH, thread, threads, taken)
        if b < 0:
            break
        block(linear, b, source, rows, scratch, more, y, WIDTH * FLOAT)
        for row in range(rows):
            target = floats(x + (row * outputs + b * WIDTH) * FLOAT)
            added = floats(y + row * WIDTH * FLOAT)
            for i in range(WIDTH):
                target[i] = target[i] + added[i]


@entry
def product(data: Any) -> None:
    """A linear layer's outputs (rows, outputs) of x (rows, inputs).

    Given: the barrier, layer, x, rows, outputs; where all threads prepare the rows, each a share;
    the first thread's scratch, and the bytes to the next one's; what is taken: zeros, a word for
    each thread.
    """
    c = words(address_of(data))
    thread, threads = np.int64(invoke(c[p.THREAD])), np.int64(invoke(c[p.THREADS]))
    linear, x, rows, y, prepared = c[3], c[4], c[5], c[6], c[7]
    if is_prepared(linear):
        begin, end = rows * thread // threads, rows * (thread + 1) // threads
        prepare(linear, x, begin, end, rows, prepared)
        invoke(c[p.BARRIER])
    more = c[8] + thread * c[9]
    multiply_prepared(linear, x, rows, y, prepared, more, thread, threads, c[10])
