"""Linear layers on packed weights: y = x W^T + b, in blocks of WIDTH outputs, shared by threads.

The weights of consecutive blocks are contiguous, so a thread reads them as one stream. float32 sums
are bit-identical to oneDNN's: each block of K_BLOCK inputs is summed, then added to the accumulated
sum. int8 sums are exact, and so equal on every processor.
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
    TILED_BFLOAT16,
    WIDENED_BFLOAT16,
    WIDENED_INT8,
    gemm,
)
from .grouped import (
    GROUPED_INT4,
    GROUPED_INT8,
    INPUTS,
    INT4_ZERO,
    INT8_ZERO,
    META_BYTES,
    grouped_gemm,
)
from .intrinsics import (
    HAS_AMX,
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
    signed,
    unsigned,
    words,
)
from .rowwise import FLOAT
from .work_stealing import claim

# Quantization of a row x: q = trunc(127 x / absmax + 128.5), bit-identical to quantized.Int8Linear.
_LARGEST = np.float32(127)
_OFFSET = np.float32(128.5)
_ONE, _TINY = np.float32(1), np.float32(1e-10)
_ZERO_POINT = np.int32(128)
_UPPER, _BELOW_HALF, _LAST, _NAN = map(np.int32, (16, 0x7FFF, 1, 0x7FC0))

# Prefetch distance in bytes with one group of rows (0: none, as fast on AVX-512). With several
# groups, each prefetches its part of the next panel.
_AHEAD = 0 if HAS_AVX512 else 1024
_GROUPED_AHEAD = 4096  # decode in int4 takes 0.8 times as long with it on AVX-512
_CACHED_BYTES = 2**17  # half of the smallest second-level cache of processors with AVX2

FLOAT32_PANEL, DOT_BFLOAT16_PANEL, WIDENED_BFLOAT16_PANEL, DOT_INT8_PANEL, WIDENED_INT8_PANEL = (
    kernel.panel for kernel in (FLOAT32, DOT_BFLOAT16, WIDENED_BFLOAT16, DOT_INT8, WIDENED_INT8)
)
_float32, _dot_bfloat16 = gemm(FLOAT32, FLOAT32_PANEL), gemm(DOT_BFLOAT16, DOT_BFLOAT16_PANEL)
TILED_BFLOAT16_PANEL = 32  # as oneDNN packs for AMX
_dot_int8, _dot_int8_half = (
    gemm(DOT_INT8, panel) for panel in (DOT_INT8_PANEL, DOT_INT8_PANEL // 2)
)
_widened_bfloat16 = gemm(WIDENED_BFLOAT16, WIDENED_BFLOAT16_PANEL)
_tiled_bfloat16 = gemm(TILED_BFLOAT16, TILED_BFLOAT16_PANEL)
_widened_int8 = gemm(WIDENED_INT8, WIDENED_INT8_PANEL)
_grouped_int8, _grouped_int4 = grouped_gemm(GROUPED_INT8), grouped_gemm(GROUPED_INT4)
_INT8_BYTES, _INT4_BYTES = GROUPED_INT8.bytes_per_output, GROUPED_INT4.bytes_per_output
_HAS_DOT_INT8 = HAS_VNNI or HAS_AVX_VNNI


@compiled
def bfloat16_bits(x: Any) -> Any:
    """Return the bits of a float32 rounded to bfloat16, ties to even; NaN stays NaN."""
    if x != x:
        return _NAN
    bits = bits_of(x)
    return (bits + _BELOW_HALF + ((bits >> _UPPER) & _LAST)) >> _UPPER


@compiled
def absmax_of(x: Any, length: Any) -> Any:
    """Return the absmax of a row, at least 1e-10, as quantized.Int8Linear; NaN if any is NaN."""
    absmax = abs_max_of(x, length)
    if absmax < _TINY:  # false for NaN
        absmax = _TINY
    return absmax


@compiled
def convert_rows(linear: Any, x: Any, begin: Any, end: Any, rows: Any, scratch: Any) -> None:
    """Convert rows `begin` to `end` of x (rows, inputs) to the layer's input format, in `scratch`.

    `scratch`: WIDTH bytes per row for the absmax of quantized rows, then the converted rows. Does
    nothing if the input format is float32.
    """
    fields = words(linear)
    form, length = fields[p.FORM], fields[p.INPUTS]
    first = scratch + rows * WIDTH
    for row in range(begin, end):
        source = floats(x + row * length * FLOAT)
        if form == p.DOT_BFLOAT16 or form == p.TILED_BFLOAT16:
            target = shorts(first + row * length * 2)
            for i in range(length):
                target[i] = np.uint16(bfloat16_bits(source[i]))
        if form == p.DOT_INT8 or form == p.WIDENED_INT8:
            absmax = absmax_of(x + row * length * FLOAT, length)
            floats(scratch)[row] = absmax
            scale = _ONE / absmax * _LARGEST
            if form == p.DOT_INT8:
                target_uint8 = unsigned(first + row * length)
                for i in range(length):
                    target_uint8[i] = np.uint8(np.int32(fma(source[i], scale, _OFFSET)))
            else:
                target_int16 = shorts(first + row * length * 2)
                for i in range(length):
                    whole = np.int32(fma(source[i], scale, _OFFSET)) - _ZERO_POINT
                    target_int16[i] = np.uint16(whole)
        if is_grouped(form):
            zero = INT8_ZERO if form == p.GROUPED_INT8 else INT4_ZERO
            _convert_groups(x + row * length * FLOAT, length, zero, first + row * _grouped(length))


@compiled
def is_grouped(form: Any) -> Any:
    """Whether weights have a scale for each group of inputs."""
    return form == p.GROUPED_INT8 or form == p.GROUPED_INT4


@compiled
def _grouped(length: Any) -> Any:
    """Return the bytes of a row in groups: see grouped.py."""
    return length + length // INPUTS * META_BYTES


@compiled
def _convert_groups(x: Any, length: Any, zero: Any, y: Any) -> None:
    """Quantize the groups of a row. `zero`: the zero point of the weights."""
    source, integers = floats(x), signed(y)
    for group in range(length // INPUTS):
        first = group * INPUTS
        absmax = absmax_of(x + first * FLOAT, INPUTS)
        scale = _ONE / absmax * _LARGEST
        total = np.int32(0)
        for i in range(first, first + INPUTS):
            whole = np.int32(fma(source[i], scale, _OFFSET)) - _ZERO_POINT
            integers[i] = np.int8(whole)
            total += whole
        meta = y + length + group * META_BYTES
        floats(meta)[0] = absmax / _LARGEST
        ints(meta)[1] = -zero * total


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
    if is_grouped(form):
        return _grouped(fields[p.INPUTS])
    if form == p.DOT_BFLOAT16 or form == p.TILED_BFLOAT16 or form == p.WIDENED_INT8:
        return 2 * fields[p.INPUTS]
    return FLOAT * fields[p.INPUTS]


@compiled
def _block_of_rows(
    linear: Any, number: Any, x: Any, rows: Any, partial: Any, y: Any, y_stride: Any
) -> None:
    """Compute the sums of a block, before scale and bias, for converted rows at x."""
    fields = words(linear)
    form, length, panel = fields[p.FORM], fields[p.INPUTS], fields[p.PANEL]
    k_block = fields[p.K_BLOCK]
    first = number * WIDTH
    x_stride = row_bytes(linear)
    groups = (rows + GROUP - 1) // GROUP
    step_bytes = panel * (bytes_of(form, INPUTS) if is_grouped(form) else FLOAT)
    for begin in range(0, length, k_block):
        end = min(begin + k_block, length)
        distance = _GROUPED_AHEAD if is_grouped(form) else _AHEAD
        fetched = step_bytes // groups if groups > 1 or distance else 0
        for column in range(0, WIDTH, panel):
            w = fields[p.WEIGHT] + (first + column) * bytes_of(form, length)
            here, following = w + panel * bytes_of(form, begin), w + panel * bytes_of(form, end)
            for group in range(groups):
                row = rows * group // groups
                count = rows * (group + 1) // groups - row
                ahead = following + (following - here) * group // groups
                if groups == 1 and distance:
                    ahead = here + distance
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
    """Compute block `number`: the outputs from WIDTH * number on, for all rows.

    `scratch`: from `convert_rows`; `partial`: room for (rows, WIDTH) sums; y: the outputs of the
    first row, with y_stride bytes between rows.
    """
    fields = words(linear)
    source = scratch + rows * WIDTH if is_converted(linear) else x
    stride = row_bytes(linear)
    # With several panels per block, each reads all rows again: take as many as the cache holds.
    chunk = rows
    if fields[p.PANEL] < WIDTH:
        chunk = max(GROUP, _CACHED_BYTES // stride // GROUP * GROUP)
    for row in range(0, rows, chunk):
        count = min(chunk, rows - row)
        _block_of_rows(
            linear, number, source + row * stride, count, partial, y + row * y_stride, y_stride
        )
    for row in range(rows):
        _finish(linear, number * WIDTH, floats(scratch)[row], y + row * y_stride)


@compiled
def bytes_of(form: Any, inputs: Any) -> Any:
    """Return the bytes of the weights of so many inputs, per output."""
    if form == p.FLOAT32:
        return inputs * 4
    if form == p.DOT_BFLOAT16 or form == p.WIDENED_BFLOAT16 or form == p.TILED_BFLOAT16:
        return inputs * 2
    if form == p.GROUPED_INT8:
        return inputs // INPUTS * _INT8_BYTES
    if form == p.GROUPED_INT4:
        return inputs // INPUTS * _INT4_BYTES
    return inputs


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
    """Call the microkernel of the form: up to GROUP rows, one panel, inputs `begin` to `end`."""
    stride = panel * FLOAT
    if form == p.FLOAT32:
        _float32(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if form == p.WIDENED_BFLOAT16:
        _widened_bfloat16(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_AMX and form == p.TILED_BFLOAT16:
        _tiled_bfloat16(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_AVX2 and form == p.WIDENED_INT8:
        _widened_int8(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_BFLOAT16 and form == p.DOT_BFLOAT16:
        _dot_bfloat16(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if _HAS_DOT_INT8 and form == p.DOT_INT8 and panel == DOT_INT8_PANEL:
        _dot_int8(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if _HAS_DOT_INT8 and form == p.DOT_INT8 and panel != DOT_INT8_PANEL:
        _dot_int8_half(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)
    if HAS_AVX2 and form == p.GROUPED_INT8:
        _grouped_int8(count, y, y_stride, x, x_stride, w, end, ahead, fetched)
    if HAS_AVX2 and form == p.GROUPED_INT4:
        _grouped_int4(count, y, y_stride, x, x_stride, w, end, ahead, fetched)


@compiled
def _finish(linear: Any, first: Any, absmax: Any, y: Any) -> None:
    """Convert a row's WIDTH sums to outputs, in place: scale, bias, rounding."""
    fields = words(linear)
    form = fields[p.FORM]
    has_bias = fields[p.BIAS] != 0
    target, bias = floats(y), floats(fields[p.BIAS] + first * FLOAT)
    if form != p.DOT_INT8 and form != p.WIDENED_INT8:
        if has_bias:
            for i in range(WIDTH):
                target[i] += bias[i]
        if form == p.DOT_BFLOAT16 or form == p.TILED_BFLOAT16:
            for i in range(WIDTH):
                target[i] = float_of(bfloat16_bits(target[i]) << _UPPER)
        return
    sums, offsets = ints(y), ints(fields[p.SUMS] + first * FLOAT)
    if form == p.DOT_INT8:
        for i in range(WIDTH):
            sums[i] += _ZERO_POINT * offsets[i]
    scale = floats(fields[p.SCALE] + first * FLOAT)
    if has_bias:
        for i in range(WIDTH):
            product = np.float32(sums[i]) * scale[i]
            target[i] = fma(product, absmax, bias[i])
    else:
        for i in range(WIDTH):
            target[i] = np.float32(sums[i]) * scale[i] * absmax


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
    """Return the address of the free scratch after the converted rows."""
    size = 2 if is_converted(linear) else 0
    return scratch + rows * WIDTH + rows * words(linear)[p.INPUTS] * size


@compiled
def multiply(
    linear: Any, x: Any, rows: Any, y: Any, scratch: Any, thread: Any, threads: Any, claimed: Any
) -> None:
    """Convert all rows into this thread's scratch, then compute the blocks that it claims."""
    convert_rows(linear, x, 0, rows, rows, scratch)
    partial = partial_sums_of(linear, rows, scratch)
    multiply_converted(linear, x, rows, y, scratch, partial, thread, threads, claimed)


@compiled
def add_outputs(
    linear: Any, source: Any, rows: Any, x: Any, y: Any, scratch: Any,
    thread: Any, threads: Any, claimed: Any,
) -> None:  # fmt: skip
    """Add a layer's outputs to x (rows, outputs), in the blocks that this thread claims.

    `source`: (rows, inputs); y: room for (rows, WIDTH).
    """
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
def linear_entry(data: Any) -> None:
    """Entry point: y (rows, outputs) = layer(x), x (rows, inputs).

    Words after the two of OpenMP.run: barrier, layer, x, rows, y; scratch for the converted rows,
    shared by all threads; scratch of the first thread, and bytes per thread; `claimed`: a word per
    thread, initially 0.
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
