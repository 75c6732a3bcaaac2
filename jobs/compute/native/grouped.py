"""GEMM microkernels for weights with a scale for each group of inputs: int8 and int4 (W8A8, W4A8).

y[n] = sum over groups g of s_x[g] s_w[g, n] (sum over k in g of q_x[k] q_w[k, n]). The integer sum
of a group is exact; groups are added in the order of the inputs, by fma. So a row gives the same
bits whatever rows are computed with it, on every processor.

A panel has, per group, the scales of its outputs in bfloat16, then their weights, in steps of 4
bytes per output: 4 inputs in int8; 8 inputs in int4, the first 4 in the lower halves of the bytes.
A row has its integers (int8), then for each group its scale (float32) and the correction for the
weights' zero point (int32). llama.cpp's Q8_0 and Q4_0 have the same groups, in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from .emitting import by_count, llvm_call, load_vector, prefetch, rows_at, spread, word
from .gemm import GROUP
from .intrinsics import HAS_AVX_VNNI, HAS_VNNI, Typed, intrinsic, loop, pointer, typed

INPUTS = 32  # of a group
SCALE_BYTES = 2  # of a group's scale per output: bfloat16
META_BYTES = 8  # of a group of a row: its scale, and its correction
HAS_DOT = HAS_VNNI or HAS_AVX_VNNI
# Zero points: the dot-product instructions multiply uint8 by int8, and nibbles have no sign.
INT8_ZERO = 128 if HAS_DOT else 0
INT4_ZERO = 8

_STEP_BYTES = 4  # weight bytes per output and step
_VECTOR_BYTES = 64 if HAS_VNNI else 32
_VECTORS = 2 if HAS_VNNI else 1  # of a panel: sums and totals of GROUP rows stay in registers
_LANES = _VECTOR_BYTES // _STEP_BYTES
PANEL = _VECTORS * _LANES

_FLOAT, _INT, _SHORT, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(8)
_FLOATS, _INTS = ir.VectorType(_FLOAT, _LANES), ir.VectorType(_INT, _LANES)
_BYTES, _SHORTS = ir.VectorType(_BYTE, _VECTOR_BYTES), ir.VectorType(_SHORT, 2 * _LANES)
_LOWER, _HALF = 0x0F0F0F0F, 4


@dataclass(frozen=True)
class GroupedKernel:
    """The arithmetic of one weight format."""

    weight_bytes: int  # of a group per output
    unpack: Callable[[Any, Any], list[Any]]  # loaded weights -> weights of 4 inputs each
    first: Callable[[Any, Any], Any]  # offset -> accumulators of a group
    add: Callable[[Any, Any, Any, Any], Any]  # (builder, sums, x, weights) -> sums
    reduce: Callable[[Any, Any, Any], Any]  # (builder, sums, offset) -> one int32 per output

    @property
    def bytes_per_output(self) -> int:
        """The bytes of a group per output."""
        return SCALE_BYTES + self.weight_bytes


def grouped_gemm(kernel: GroupedKernel) -> Any:
    """Return the microkernel of a panel, for 1 to GROUP rows:

    f(count, y, y_stride, x, x_stride, w, inputs, ahead, fetched)

    y: (count, PANEL) float32; strides are in bytes. Each group prefetches as many bytes as it has;
    the first one from the address `ahead` on, each further one `fetched` bytes later.
    """
    group_bytes = PANEL * kernel.bytes_per_output

    def emit(
        builder: Any, count: int, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, inputs: Any, ahead: Any, fetched: Any,
    ) -> None:  # fmt: skip
        rows = rows_at(builder, x, x_stride, count)

        def multiply(number: Any, totals: Sequence[Any]) -> list[Any]:
            place = builder.add(ahead, builder.mul(number, fetched))
            prefetch(builder, place, group_bytes)
            place = builder.add(w, builder.mul(number, word(group_bytes)))
            in_row = builder.mul(number, word(INPUTS))
            meta = builder.add(inputs, builder.mul(number, word(META_BYTES)))
            after_scale = builder.add(meta, word(META_BYTES // 2))
            sums = _sums(
                builder,
                kernel,
                [builder.add(row, in_row) for row in rows],
                [spread(builder, _INT, builder.add(row, after_scale), _LANES) for row in rows],
                builder.add(place, word(PANEL * SCALE_BYTES)),
            )
            factors = [spread(builder, _FLOAT, builder.add(row, meta), _LANES) for row in rows]
            scales = _scales(builder, place)
            return [
                _added(
                    builder,
                    total,
                    sums[index],
                    builder.fmul(scales[index % _VECTORS], factors[index // _VECTORS]),
                )
                for index, total in enumerate(totals)
            ]

        none = [ir.Constant(_FLOATS, [0.0] * _LANES)] * (count * _VECTORS)
        totals = loop(builder, builder.sdiv(inputs, word(INPUTS)), 1, none, multiply)
        targets = [
            builder.add(row, word(part))
            for row in rows_at(builder, y, y_stride, count)
            for part in range(0, PANEL * _STEP_BYTES, _VECTOR_BYTES)
        ]
        for total, target in zip(totals, targets, strict=True):
            builder.store(total, pointer(_FLOATS)(builder, target), align=4)

    @intrinsic
    def gemm_of_rows(
        typing: Any, count: Any, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, inputs: Any, ahead: Any, fetched: Any,
    ) -> Typed:  # fmt: skip
        return typed(by_count(emit, GROUP), types.void, *(types.int64,) * 9)

    return gemm_of_rows


def _sums(
    builder: Any, kernel: GroupedKernel, rows: Sequence[Any], offsets: Sequence[Any], weights: Any
) -> list[Any]:
    """Return the integer sums of a group, for each row and vector, with the row's offset.

    `rows`, `weights`: addresses.
    """
    sums = [
        kernel.first(builder, offsets[index // _VECTORS]) for index in range(len(rows) * _VECTORS)
    ]
    in_row = 0
    for step in range(kernel.weight_bytes // _STEP_BYTES):
        places = [
            builder.add(weights, word(step * PANEL * _STEP_BYTES + vector * _VECTOR_BYTES))
            for vector in range(_VECTORS)
        ]
        loaded = [kernel.unpack(builder, load_vector(builder, _INTS, each)) for each in places]
        for part in range(len(loaded[0])):
            xs = [spread(builder, _INT, builder.add(row, word(in_row)), _LANES) for row in rows]
            sums = [
                kernel.add(builder, total, xs[index // _VECTORS], loaded[index % _VECTORS][part])
                for index, total in enumerate(sums)
            ]
            in_row += _STEP_BYTES
    return [
        kernel.reduce(builder, total, offsets[index // _VECTORS])
        for index, total in enumerate(sums)
    ]


def _scales(builder: Any, place: Any) -> list[Any]:
    """Load the scales of a group, bfloat16, as float32."""
    halves = ir.VectorType(_SHORT, _LANES)
    found = []
    for vector in range(_VECTORS):
        at = builder.add(place, word(vector * _LANES * SCALE_BYTES))
        wide = builder.zext(load_vector(builder, halves, at, align=2), _INTS)
        upper = builder.shl(wide, ir.Constant(_INTS, [16] * _LANES))
        found.append(builder.bitcast(upper, _FLOATS))
    return found


def _added(builder: Any, total: Any, integers: Any, scale: Any) -> Any:
    factor = builder.sitofp(integers, _FLOATS)
    return llvm_call(builder, f"llvm.fma.v{_LANES}f32", factor, scale, total, returns=_FLOATS)


# --- The formats ------------------------------------------------------------------------------


def _whole(builder: Any, loaded: Any) -> list[Any]:
    return [loaded]


def _nibbles(builder: Any, loaded: Any) -> list[Any]:
    mask, shift = (ir.Constant(_INTS, [value] * _LANES) for value in (_LOWER, _HALF))
    return [builder.and_(loaded, mask), builder.and_(builder.lshr(loaded, shift), mask)]


def _offset(builder: Any, offset: Any) -> Any:
    return offset


def _sum(builder: Any, sums: Any, offset: Any) -> Any:
    return sums


def _dot(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    """uint8 weights by int8 inputs, four products added to each int32 sum."""
    name = f"llvm.x86.avx512.vpdpbusd.{8 * _VECTOR_BYTES}"
    operands = [builder.bitcast(each, _BYTES) for each in (weights, x)]
    return llvm_call(builder, name, sums, *operands, returns=_INTS)


def _pairs(builder: Any, weights: Any, x: Any) -> Any:
    """Multiply uint8 weights by int8 inputs and add pairs, in int16."""
    return llvm_call(builder, "llvm.x86.avx2.pmadd.ub.sw", weights, x, returns=_SHORTS)


def _of_pairs(builder: Any, shorts: Any) -> Any:
    """Add pairs of int16, in int32."""
    ones = ir.Constant(_SHORTS, [1] * _SHORTS.count)
    return llvm_call(builder, "llvm.x86.avx2.pmadd.wd", shorts, ones, returns=_INTS)


def _no_pairs(builder: Any, offset: Any) -> Any:
    return ir.Constant(_SHORTS, [0] * _SHORTS.count)


def _sum_of_pairs(builder: Any, sums: Any, offset: Any) -> Any:
    return builder.add(_of_pairs(builder, sums), offset)


def _add_nibbles(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    """int16 sums: at most 8 steps of two products of 15 * 127 each, so none overflows."""
    pairs = _pairs(builder, builder.bitcast(weights, _BYTES), builder.bitcast(x, _BYTES))
    return builder.add(sums, pairs)


def _add_bytes(builder: Any, sums: Any, x: Any, weights: Any) -> Any:
    """|w| by x with the sign of w: two products of 127 * 127 fit int16."""
    signed = builder.bitcast(weights, _BYTES)
    none = ir.Constant(_BYTES, [0] * _VECTOR_BYTES)
    is_negative = builder.icmp_signed("<", signed, none)
    absolute = builder.select(is_negative, builder.sub(none, signed), signed)
    turned = llvm_call(
        builder, "llvm.x86.avx2.psign.b", builder.bitcast(x, _BYTES), signed, returns=_BYTES
    )
    return builder.add(sums, _of_pairs(builder, _pairs(builder, absolute, turned)))


if HAS_DOT:
    GROUPED_INT8 = GroupedKernel(INPUTS, _whole, _offset, _dot, _sum)
    GROUPED_INT4 = GroupedKernel(INPUTS // 2, _nibbles, _offset, _dot, _sum)
else:
    GROUPED_INT8 = GroupedKernel(INPUTS, _whole, _offset, _add_bytes, _sum)
    GROUPED_INT4 = GroupedKernel(INPUTS // 2, _nibbles, _no_pairs, _add_nibbles, _sum_of_pairs)
