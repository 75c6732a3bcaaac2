"""Linear layers on packed weights: y = x W^T + b, in blocks of WIDTH outputs that threads share.

The weights of consecutive blocks are contiguous, so a thread reads them as one stream. float32 sums
have oneDNN's bits: blocks of RUN inputs, each added to the accumulated sum. int8 sums are exact,
and so equal on every processor.
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
    abs_max_of,
    address_of,
    bits_of,
    call as invoke,
    float_of,
    floats,
    fma,
    ints,
    shorts,
    unsigned,
    words,
)
from .rowwise import FLOAT
from .work_stealing import claim

_UNITS = np.float32(127)  # of the largest of a row: quantized.Int8Linear, the same to the bit
_OFFSET = np.float32(128.5)
_ONE, _TINY = np.float32(1), np.float32(1e-10)
_ZERO_POINT = np.int32(128)
_UPPER, _BELOW_HALF, _LAST, _NAN = map(np.int32, (16, 0x7FFF, 1, 0x7FC0))

# What follows is prefetched: for one group of rows so many bytes ahead in the same stream (0:
# nothing, which on AVX-512 was as fast), for several the next panel, a part by each group.
_AHEAD = 0 if HAS_AVX512 else 1024
_CACHED_BYTES = 2**17  # half of the smallest second-level cache that processors with AVX2 have

FLOAT32_PANEL, DOT_BFLOAT16_PANEL, WIDENED_BFLOAT16_PANEL, DOT_INT8_PANEL, WIDENED_INT8_PANEL = (
    kind.panel for kind in (FLOAT32, DOT_BFLOAT16, WIDENED_BFLOAT16, DOT_INT8, WIDENED_INT8)
)
_float32, _dot_bfloat16 = gemm(FLOAT32, FLOAT32_PANEL), gemm(DOT_BFLOAT16, DOT_BFLOAT16_PANEL)
_dot_int8, _dot_int8_half = (
    gemm(DOT_INT8, panel) for panel in (DOT_INT8_PANEL, DOT_INT8_PANEL // 2)
)
_widened_bfloat16 = gemm(WIDENED_BFLOAT16, WIDENED_BFLOAT16_PANEL)
_widened_int8 = gemm(WIDENED_INT8, WIDENED_INT8_PANEL)
_HAS_DOT_INT8 = HAS_VNNI or HAS_AVX_VNNI


@compiled
def half(x: Any) -> Any:
    """Return the bits of a float32 rounded to bfloat16, ties to even."""
    if x != x:
        return _NAN
    bits = bits_of(x)
    return (bits + _BELOW_HALF + ((bits >> _UPPER) & _LAST)) >> _UPPER


@compiled
def absmax_of(x: Any, length: Any) -> Any:
    """Return the absmax of a row, at least 1e-10: the same bits as quantized.Int8Linear."""
    most = abs_max_of(x, length)
    if most < _TINY:  # NaN stays
        most = _TINY
    return most


@compiled
def convert_rows(linear: Any, x: Any, begin: Any, end: Any, rows: Any, scratch: Any) -> None:
    """Convert rows `begin` to `end` of x (rows, inputs) to the layer's input format, in `scratch`.

    `scratch` has WIDTH bytes per row for the absmax of quantized rows, then the rows. float32 rows
    stay where they are.
    """
    fields = words(linear)
    form, length = fields[p.FORM], fields[p.INPUTS]
    first = scratch + rows * WIDTH
    for row in range(begin, end):
        source = floats(x + row * length * FLOAT)
        if form == p.DOT_BFLOAT16:
            target = shorts(first + row * length * 2)
            for i in range(length):
                target[i] = np.uint16(half(source[i]))
        if form == p.DOT_INT8 or form == p.WIDENED_INT8:
            most = absmax_of(x + row * length * FLOAT, length)
            floats(scratch)[row] = most
            unit = _ONE / most * _UNITS
            if form == p.DOT_INT8:
                bytes_of = unsigned(first + row * length)
                for i in range(length):
                    bytes_of[i] = np.uint8(np.int32(fma(source[i], unit, _OFFSET)))
            else:
                shorts_of = shorts(first + row * length * 2)
                for i in range(length):
                    signed = np.int32(fma(source[i], unit, _OFFSET)) - _ZERO_POINT
                    shorts_of[i] = np.uint16(signed)


@compiled
def is_converted(linear: Any) -> Any:
    """Whether a layer's input format is not float32."""
    form = words(linear)[p.FORM]
    return form != p.FLOAT32 and form != p.WIDENED_BFLOAT16


@compiled
def row_bytes(linear: Any) -> Any:
    """Return the bytes of a row in the layer's input format."""
    fields = words(linear)
    form = fields[p.FORM]
    if form == p.DOT_INT8:
        return fields[p.INPUTS]
    if form == p.DOT_BFLOAT16 or form == p.WIDENED_INT8:
        return 2 * fields[p.INPUTS]
    return FLOAT * fields[p.INPUTS]


@compiled
def _block_of_rows(
    linear: Any, number: Any, x: Any, rows: Any, partial: Any, y: Any, y_stride: Any
) -> None:
    """Compute the sums of a block for converted rows at x."""
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
                target, target_stride = (partial, panel * FLOAT) if begin else (place, y_stride)
                _multiply_panel(
                    form, panel, count, target, target_stride, x + row * x_stride, x_stride,
                    w, begin, end, ahead, fetched,
                )  # fmt: skip
                if begin:
                    _add(place, y_stride, partial, count, panel)


@compiled
def block(
    linear: Any, number: Any, x: Any, rows: Any, scratch: Any, partial: Any, y: Any, y_stride: Any
) -> None:
    """Compute WIDTH outputs of all rows, from WIDTH * number on.

    `scratch`: from `convert_rows`; `partial`: room for (rows, WIDTH) sums; y: the outputs of the
    first row, with y_stride bytes between rows.
    """
    fields = words(linear)
    source = scratch + rows * WIDTH if is_converted(linear) else x
    stride = row_bytes(linear)
    # A block of narrow panels reads the rows once for each: so many at a time stay in the cache.
    most = rows
    if fields[p.PANEL] < WIDTH:
        most = max(GROUP, _CACHED_BYTES // stride // GROUP * GROUP)
    for row in range(0, rows, most):
        count = min(most, rows - row)
        _block_of_rows(
            linear, number, source + row * stride, count, partial, y + row * y_stride, y_stride
        )
    for row in range(rows):
        _finish(linear, number * WIDTH, floats(scratch)[row], y + row * y_stride)


@compiled
def _weight_bytes(form: Any) -> Any:
    if form == p.FLOAT32:
        return 4
    if form == p.DOT_BFLOAT16 or form == p.WIDENED_BFLOAT16:
        return 2
    return 1


@compiled
def _add(y: Any, y_stride: Any, partial: Any, rows: Any, panel: Any) -> None:
    """y (rows, panel) += partial."""
    for row in range(rows):
        target, added = floats(y + row * y_stride), floats(partial + row * panel * FLOAT)
        for i in range(panel):
            target[i] += added[i]


@compiled
def _multiply_panel(
    form: Any, panel: Any, count: Any, y: Any, y_stride: Any, x: Any, x_stride: Any,
    w: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
) -> None:  # fmt: skip
    """The sums of up to GROUP rows with a panel, from inputs `begin` to `end`."""
    stride = panel * FLOAT
    if form == p.FLOAT32:
        _float32(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if form == p.WIDENED_BFLOAT16:
        _widened_bfloat16(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_AVX2 and form == p.WIDENED_INT8:
        _widened_int8(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_BFLOAT16 and form == p.DOT_BFLOAT16:
        _dot_bfloat16(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if _HAS_DOT_INT8 and form == p.DOT_INT8 and panel == DOT_INT8_PANEL:
        _dot_int8(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if _HAS_DOT_INT8 and form == p.DOT_INT8 and panel != DOT_INT8_PANEL:
        _dot_int8_half(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)


@compiled
def _finish(linear: Any, first: Any, unit: Any, y: Any) -> None:
    """Turn sums into outputs: scale, bias, rounding."""
    fields = words(linear)
    form = fields[p.FORM]
    has_bias = fields[p.BIAS] != 0
    target, bias = floats(y), floats(fields[p.BIAS] + first * FLOAT)
    if form != p.DOT_INT8 and form != p.WIDENED_INT8:
        if has_bias:
            for i in range(WIDTH):
                target[i] += bias[i]
        if form == p.DOT_BFLOAT16:
            for i in range(WIDTH):
                target[i] = float_of(half(target[i]) << _UPPER)
        return
    sums, offsets = ints(y), ints(fields[p.SUMS] + first * FLOAT)
    if form == p.DOT_INT8:
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
def multiply_converted(
    linear: Any, x: Any, rows: Any, y: Any, scratch: Any, partial: Any,
    thread: Any, threads: Any, claimed: Any,
) -> None:  # fmt: skip
    """Compute the blocks of y (rows, outputs) that this thread claims."""
    outputs = words(linear)[p.OUTPUTS]
    while True:
        b = claim(outputs // WIDTH, thread, threads, claimed)
        if b < 0:
            break
        block(linear, b, x, rows, scratch, partial, y + b * WIDTH * FLOAT, outputs * FLOAT)


@compiled
def partial_sums_of(linear: Any, rows: Any, scratch: Any) -> Any:
    """Return the address of free scratch behind the converted rows."""
    size = 2 if is_converted(linear) else 0
    return scratch + rows * WIDTH + rows * words(linear)[p.INPUTS] * size


@compiled
def multiply(
    linear: Any, x: Any, rows: Any, y: Any, scratch: Any, thread: Any, threads: Any, claimed: Any
) -> None:
    """Convert all rows in this thread's scratch; compute the blocks that it claims."""
    convert_rows(linear, x, 0, rows, rows, scratch)
    partial = partial_sums_of(linear, rows, scratch)
    multiply_converted(linear, x, rows, y, scratch, partial, thread, threads, claimed)


@compiled
def add_product(
    linear: Any, source: Any, rows: Any, x: Any, y: Any, scratch: Any,
    thread: Any, threads: Any, claimed: Any,
) -> None:  # fmt: skip
    """x += those of a layer's outputs that this thread takes. y: room for (rows, WIDTH)."""
    convert_rows(linear, source, 0, rows, rows, scratch)
    partial = partial_sums_of(linear, rows, scratch)
    outputs = words(linear)[p.OUTPUTS]
    while True:
        b = claim(outputs // WIDTH, thread, threads, claimed)
        if b < 0:
            break
        block(linear, b, source, rows, scratch, partial, y, WIDTH * FLOAT)
        for row in range(rows):
            target = floats(x + (row * outputs + b * WIDTH) * FLOAT)
            added = floats(y + row * WIDTH * FLOAT)
            for i in range(WIDTH):
                target[i] = target[i] + added[i]


@entry
def product(data: Any) -> None:
    """Entry: y (rows, outputs) of x (rows, inputs).

    Words: barrier, layer, x, rows, y; scratch for the converted rows, which all threads share;
    scratch of the first thread, and bytes per thread; `claimed`, zeros, a word per thread.
    """
    c = words(address_of(data))
    thread, threads = np.int64(invoke(c[p.THREAD])), np.int64(invoke(c[p.THREADS]))
    linear, x, rows, y, prepared = c[3], c[4], c[5], c[6], c[7]
    if is_converted(linear):
        begin, end = rows * thread // threads, rows * (thread + 1) // threads
        convert_rows(linear, x, begin, end, rows, prepared)
        invoke(c[p.BARRIER])
    partial = c[8] + thread * c[9]
    multiply_converted(linear, x, rows, y, prepared, partial, thread, threads, c[10])
