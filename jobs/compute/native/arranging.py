"""Arranges weights in panels, the order in which the microkernels of `gemm` read them.

A panel has the weights of a few outputs, in the order [inputs / depth, outputs, depth], where
`depth` is the number of inputs that a microkernel multiplies per step. Panels are contiguous.
`grouped` has the order of weights with a scale for each group of inputs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import layout as p
from .compiling import compiled, entry
from .grouped import INPUTS
from .grouping import store_groups
from .intrinsics import address_of, call, float_of, floats, ints, shorts, signed, words
from .linear import absmax_of, bfloat16_bits, bytes_of, is_grouped
from .rowwise import FLOAT
from .work_stealing import claim

_LARGEST = np.float32(127)
_UPPER = np.int32(16)


@compiled
def load(row: Any, is_bfloat16: Any, y: Any, length: Any) -> None:
    """y (length,) float32 = a row of weights in float32 or bfloat16."""
    target = floats(y)
    if is_bfloat16:
        source = shorts(row)
        for i in range(length):
            target[i] = float_of(np.int32(source[i]) << _UPPER)
    else:
        whole = floats(row)
        for i in range(length):
            target[i] = whole[i]


@compiled
def store(form: Any, row: Any, length: Any, y: Any, panel: Any) -> Any:
    """Store a row (length,) float32 into its column of a panel at y; return its scale.

    int8 weights are quantized by the absmax of the row; in the other forms the scale is 1.
    """
    source = floats(row)
    if form == p.FLOAT32:
        target = floats(y)
        for i in range(length):
            target[i * panel] = source[i]
    elif form == p.WIDENED_BFLOAT16:
        pairs = shorts(y)
        for i in range(length):
            pairs[i // 2 * 2 * panel + i % 2] = np.uint16(bfloat16_bits(source[i]))
    else:
        scale = absmax_of(row, length) / _LARGEST
        quads = signed(y)
        for i in range(length):
            quads[i // 4 * 4 * panel + i % 4] = np.int8(np.rint(source[i] / scale))
        return scale
    return np.float32(1)


@compiled
def _negative_sum(quads: Any, length: Any, panel: Any) -> Any:
    """Return minus the sum of a row's int8 weights, which corrects for the inputs' zero point."""
    source = signed(quads)
    total = np.int32(0)
    for i in range(length):
        total -= np.int32(source[i // 4 * 4 * panel + i % 4])
    return total


@entry
def arrange(data: Any) -> None:
    """Entry point: fill the panels that this thread claims.

    Words after the two of OpenMP.run: form, panel width, inputs, padded inputs, padded outputs;
    the address of each row (0: a row of zeros), whether the rows are bfloat16; the panels;
    scales, float32 per output; sums, int32 per output, or 0; scratch, padded inputs in float32 and
    INPUTS more per thread; `claimed`: a word per thread, initially 0.
    """
    c = words(address_of(data))
    thread, threads = np.int64(call(c[0])), np.int64(call(c[1]))
    form, panel, length, padded, outputs = c[2], c[3], c[4], c[5], c[6]
    rows, is_bfloat16, y, scales = words(c[7]), c[8], c[9], floats(c[10])
    sums, totals = c[11], ints(c[11])
    scratch, claimed = c[12] + thread * (padded + INPUTS) * FLOAT, c[13]
    zeros = floats(scratch)
    size, depth = 4, 1  # bytes of a weight
    if form == p.WIDENED_BFLOAT16:
        size, depth = 2, 2
    elif form != p.FLOAT32:
        size, depth = 1, 4
    for i in range(length, padded):
        zeros[i] = np.float32(0)
    while True:
        number = claim(outputs // panel, thread, threads, claimed)
        if number < 0:
            break
        first = y + number * panel * bytes_of(form, padded)
        for column in range(panel):
            output = number * panel + column
            if rows[output] != 0:
                load(rows[output], is_bfloat16, scratch, length)
            else:
                for i in range(length):
                    zeros[i] = np.float32(0)
            if is_grouped(form):
                store_groups(form, scratch, padded, first, panel, column)
                continue
            place = first + column * depth * size
            scales[output] = store(form, scratch, padded, place, panel)
            if sums != 0:
                totals[output] = _negative_sum(place, padded, panel)
