"""Quantizes weights in groups of inputs, int8 and int4, into the panels that `grouped` reads.

int8: the scale is absmax / 127. int4: integers q from -8 to 7. Of some scales around absmax / 8
those integers are taken whose best scale, sum(w q) / sum(q q), has the least squared error.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from . import layout as p
from .compiling import compiled
from .grouped import GROUPED_INT4, GROUPED_INT8, INPUTS, INT4_ZERO, INT8_ZERO, SCALE_BYTES
from .intrinsics import float_of, floats, fma, ints, shorts, unsigned
from .linear import absmax_of, bfloat16_bits
from .rowwise import FLOAT

_UPPER = np.int32(16)
_LARGEST, _ONE = np.float32(127), np.float32(1)
# A weight w is rounded as trunc(w / scale + offset) - zero: trunc rounds positive numbers down.
_ROUND8, _ZERO8 = np.float32(128.5), np.int32(128)
_ROUND4, _ZERO4, _LEAST4, _MOST4 = np.float32(8.5), np.int32(8), np.int32(0), np.int32(15)
_BYTES8, _BYTES4 = GROUPED_INT8.bytes_per_output, GROUPED_INT4.bytes_per_output
_STEP_BYTES, _STEP4 = 4, 8  # weight bytes per output and step; inputs of a step in int4
# The largest weight is -9 times the scale, then -8.6 times and so on, to -6.6; q is never below -8.
_TRIED, _FIRST, _BETWEEN = 7, np.float32(-9), np.float32(0.4)
_FIXED = np.float32(2**15)  # weights as integers for the sums: these can be vectorized


@compiled
def _best_scale(source: Any, fixed: Any) -> Any:
    """Return the scale in int4 of a group at `source`. `fixed`: room for INPUTS int32."""
    weights, integers = floats(source), ints(fixed)
    largest = absmax_of(source, INPUTS)
    for i in range(INPUTS):
        if weights[i] == -largest:
            largest = weights[i]
    if largest != largest:
        return largest
    unit = _FIXED / largest
    for i in range(INPUTS):
        integers[i] = np.int32(weights[i] * unit)
    best, scale = np.float64(-1), np.float64(1)
    for tried in range(_TRIED):
        factor = (_FIRST + np.float32(tried) * _BETWEEN) / largest
        products, squares = np.int32(0), np.int32(0)
        for i in range(INPUTS):  # numba widens integers to 64 bits, in which less fits a register
            q = np.int32(fma(weights[i], factor, _ROUND4))
            q = np.int32(min(max(q, _LEAST4), _MOST4) - _ZERO4)
            products = np.int32(products + np.int32(q * integers[i]))
            squares = np.int32(squares + np.int32(q * q))
        if squares > 0:
            found = np.float64(products) / squares
            if found * products > best:
                best, scale = found * products, found
    return np.float32(scale / _FIXED * largest)


@compiled
def _rounded_up(scale: Any) -> Any:
    """Return the bits of a bfloat16, the nearest of at least a positive scale."""
    bits = bfloat16_bits(scale)
    if float_of(bits << _UPPER) < scale:
        bits += 1
    return bits


@compiled
def store_groups(form: Any, row: Any, length: Any, y: Any, panel: Any, column: Any) -> None:
    """Store a row (length,) float32 into its column of a panel at y.

    Needs room for INPUTS int32 after the row.
    """
    group_bytes = panel * (_BYTES8 if form == p.GROUPED_INT8 else _BYTES4)
    for group in range(length // INPUTS):
        source = row + group * INPUTS * FLOAT
        place = y + group * group_bytes
        scales, steps = shorts(place), place + panel * SCALE_BYTES + column * _STEP_BYTES
        if form == p.GROUPED_INT8:
            bits = _rounded_up(absmax_of(source, INPUTS) / _LARGEST)
            _store_int8(source, _ONE / float_of(bits << _UPPER), steps, panel)
        else:
            bits = bfloat16_bits(_best_scale(source, row + length * FLOAT))
            _store_int4(source, _ONE / float_of(bits << _UPPER), steps, panel)
        scales[column] = np.uint16(bits)


@compiled
def _store_int8(source: Any, factor: Any, steps: Any, panel: Any) -> None:
    weights, target = floats(source), unsigned(steps)
    for i in range(INPUTS):
        q = np.int32(fma(weights[i], factor, _ROUND8)) - _ZERO8 + INT8_ZERO
        target[i // _STEP_BYTES * panel * _STEP_BYTES + i % _STEP_BYTES] = np.uint8(q)


@compiled
def _store_int4(source: Any, factor: Any, steps: Any, panel: Any) -> None:
    weights, target = floats(source), unsigned(steps)
    for i in range(INPUTS):
        q = min(max(np.int32(fma(weights[i], factor, _ROUND4)), _LEAST4), _MOST4)
        q += INT4_ZERO - _ZERO4
        place = i // _STEP4 * panel * _STEP_BYTES + i % _STEP_BYTES
        if i % _STEP4 < _STEP_BYTES:
            target[place] = np.uint8(q)
        else:
            target[place] |= np.uint8(q << 4)
