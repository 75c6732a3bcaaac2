"""GEMM microkernels: register-blocked inner loops, one for each weight format.

A microkernel multiplies up to GROUP rows by one packed panel of weights. It accumulates in vector
registers, in the order of the inputs, so it is batch-invariant: a row gives the same bits whatever
rows are computed with it. The panel width follows from the number of vector registers: weights are
loaded once for all rows of a group, and a panel is one stream of memory.

Blocking: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008). Without
VNNI, int8 weights are widened to int16 and multiplied in pairs (pmaddwd), which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types

from .emitting import by_count, llvm_call, load_vector, prefetch, rows_at, spread, word
from .intrinsics import (
    HAS_AVX512,
    LINE,
    REGISTERS,
    VECTOR_BYTES,
    Typed,
    intrinsic,
    loop,
    pointer,
    typed,
)

GROUP = 6  # most rows of one call of a microkernel

_FLOAT, _INT, _WORD, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
_SHORT = ir.IntType(16)
_OUTPUT_BYTES = 4  # weight bytes per output and step; an accumulator has as many
_SUM_REGISTERS = REGISTERS * 3 // 4  # accumulators; the others hold weights and inputs
_UPPER_HALF = -(1 << 16)


class _BFloat16Type(ir.types.Type):  # type: ignore[misc, unused-ignore]
    """LLVM's bfloat16 type, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


@dataclass(frozen=True)
class Microkernel:
    """One weight format: a step multiplies `depth` inputs of a row by 4 weight bytes per output."""

    depth: int
    row_bytes: int  # bytes of a row that a step reads
    vector_bytes: int  # bytes of weights in one register
    sums: int  # accumulator registers per row and weight register
    sum: ir.Type
    load: Callable[[Any, Any], Any]  # (builder, address of weights) -> weights
    load_row: Callable[[Any, Any], Any]  # (builder, address in a row) -> factors
    add: Callable[[Any, Sequence[Any], Any, Any], list[Any]]  # sums + factors * weights
    reduce: Callable[[Any, Sequence[Any]], Any]  # accumulators of a row -> one sum per output
    # Steps after which the accumulators are reduced, added to totals and set to 0; None: all steps.
    tile: int | None = None

    @property
    def panel(self) -> int:
        """Panel width: as many outputs as there are accumulators for, with GROUP rows."""
        vectors = max(1, _SUM_REGISTERS // (GROUP * self.sums))
        return vectors * self.vector_bytes // _OUTPUT_BYTES


def gemm(kernel: Microkernel, panel: int, most: int = GROUP) -> Any:
    """Return the microkernel of a panel of `panel` outputs, for 1 to `most` rows:

    f(count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched)

    y[row, n] = sum of x[row, k] w[k / depth, n, k % depth] for begin <= k < end, at least one step;
    row < count, n < panel. Strides are in bytes, between rows and between the steps of w.

    Each step prefetches half as many bytes as it reads of w, at least a cache line. The first step
    starts at the address `ahead`, each further one `fetched` bytes later (0: at the same address).
    """
    lanes = kernel.vector_bytes // _OUTPUT_BYTES
    panel_bytes = panel * _OUTPUT_BYTES  # weights of a step, and a row's sums
    fetched_bytes = max(LINE, panel_bytes // 2)  # two groups of rows fetch one half each
    sums_type = ir.VectorType(kernel.sum, lanes)
    places = [word(place) for place in range(0, panel_bytes, kernel.vector_bytes)]

    def emit(
        builder: Any, count: int, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, stride: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
    ) -> None:  # fmt: skip
        rows = rows_at(builder, x, x_stride, count)
        depth = word(kernel.depth)
        first, last = builder.sdiv(begin, depth), builder.sdiv(end, depth)

        def multiply(number: Any, sums: Sequence[Any]) -> list[Any]:
            done = builder.mul(builder.sub(number, first), fetched)
            prefetch(builder, builder.add(ahead, done), fetched_bytes)
            place = builder.add(w, builder.mul(number, stride))
            weights = [kernel.load(builder, builder.add(place, part)) for part in places]
            in_row = builder.mul(number, word(kernel.row_bytes))
            factors = [kernel.load_row(builder, builder.add(row, in_row)) for row in rows]
            pairs = [(factor, weight) for factor in factors for weight in weights]
            return [
                total
                for index, pair in enumerate(pairs)
                for total in kernel.add(builder, _part(sums, index, kernel.sums), *pair)
            ]

        def reduced(sums: Sequence[Any]) -> list[Any]:
            parts = (_part(sums, index, kernel.sums) for index in range(count * len(places)))
            return [kernel.reduce(builder, part) for part in parts]

        def multiply_tile(number: Any, totals: Sequence[Any]) -> list[Any]:
            sums: Sequence[Any] = zeros
            for index in range(kernel.tile or 0):
                sums = multiply(builder.add(number, word(index)), sums)
            return [builder.fadd(*pair) for pair in zip(totals, reduced(sums), strict=True)]

        zeros = [ir.Constant(sums_type, [0] * lanes)] * (count * len(places) * kernel.sums)
        if kernel.tile is None:
            totals = reduced(loop(builder, last, 1, zeros, multiply, first))
        else:
            none = zeros[: count * len(places)]
            totals = loop(builder, last, kernel.tile, none, multiply_tile, first)
        outputs = rows_at(builder, y, y_stride, count)
        targets = [builder.add(row, part) for row in outputs for part in places]
        for total, target in zip(totals, targets, strict=True):
            builder.store(total, pointer(sums_type)(builder, target), align=_OUTPUT_BYTES)

    @intrinsic
    def gemm_of_rows(
        typing: Any, count: Any, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, stride: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
    ) -> Typed:  # fmt: skip
        return typed(by_count(emit, most), types.void, *(types.int64,) * 11)

    return gemm_of_rows


def _part(values: Sequence[Any], index: int, size: int) -> Sequence[Any]:
    return values[index * size : (index + 1) * size]


# --- The microkernels -------------------------------------------------------------------------


def _loader(of: Any, lanes: int) -> Callable[[Any, Any], Any]:
    """Load a vector from an address aligned to its 4-byte elements."""

    def load(builder: Any, address: Any) -> Any:
        return load_vector(builder, ir.VectorType(of, lanes), address)

    return load


def _broadcaster(of: Any, lanes: int, as_type: Any = None) -> Callable[[Any, Any], Any]:
    """Load one element and broadcast it to every lane."""

    def load_row(builder: Any, address: Any) -> Any:
        value = spread(builder, of, address, lanes)
        return value if as_type is None else builder.bitcast(value, as_type)

    return load_row


def _only(builder: Any, sums: Sequence[Any]) -> Any:
    (one,) = sums
    return one


def _float32() -> Microkernel:
    lanes = VECTOR_BYTES // 4
    vector = ir.VectorType(_FLOAT, lanes)

    def add(builder: Any, sums: Sequence[Any], factor: Any, weight: Any) -> list[Any]:
        name = f"llvm.fma.v{lanes}f32"
        return [llvm_call(builder, name, factor, weight, *sums, returns=vector)]

    return Microkernel(
        1, 4, VECTOR_BYTES, 1, _FLOAT, _loader(_FLOAT, lanes), _broadcaster(_FLOAT, lanes), add,
        _only,
    )  # fmt: skip


def _dot(depth: int, name: str, total: Any, factor: Any, vector_bytes: int) -> Microkernel:
    """A dot-product instruction: `name(sums, x, w)` adds the products of `depth` inputs."""
    lanes = vector_bytes // 4
    factors, sums_type = ir.VectorType(factor, depth * lanes), ir.VectorType(total, lanes)

    def add(builder: Any, sums: Sequence[Any], x: Any, weight: Any) -> list[Any]:
        operands = [*sums, *(builder.bitcast(each, factors) for each in (x, weight))]
        return [llvm_call(builder, name, *operands, returns=sums_type)]

    return Microkernel(
        depth, 4, vector_bytes, 1, total, _loader(_INT, lanes), _broadcaster(_INT, lanes), add,
        _only,
    )  # fmt: skip


def _halves(builder: Any, pairs: Any) -> list[Any]:
    """Widen pairs of bfloat16, each the upper half of a float32, by a shift and by a mask."""
    lanes = pairs.type.count
    shift, mask = (ir.Constant(pairs.type, [value] * lanes) for value in (16, _UPPER_HALF))
    return [
        builder.bitcast(half, ir.VectorType(_FLOAT, lanes))
        for half in (builder.shl(pairs, shift), builder.and_(pairs, mask))
    ]


def _widened_bfloat16() -> Microkernel:
    """bfloat16 weights by float32 rows, two inputs per step."""
    lanes = VECTOR_BYTES // 4
    vector = ir.VectorType(_FLOAT, lanes)
    load_ints, load_float = _loader(_INT, lanes), _broadcaster(_FLOAT, lanes)

    def load(builder: Any, address: Any) -> Any:
        return _halves(builder, load_ints(builder, address))

    def load_row(builder: Any, address: Any) -> Any:
        return [load_float(builder, builder.add(address, word(place))) for place in (0, 4)]

    def add(builder: Any, sums: Sequence[Any], factors: Any, weights: Any) -> list[Any]:
        (total,) = sums
        for factor, weight in zip(factors, weights, strict=True):
            name = f"llvm.fma.v{lanes}f32"
            total = llvm_call(builder, name, factor, weight, total, returns=vector)
        return [total]

    return Microkernel(2, 8, VECTOR_BYTES, 1, _FLOAT, load, load_row, add, _only)


def _tiled_bfloat16() -> Microkernel:
    """bfloat16 weights by bfloat16 rows, two inputs per step, with the bits of AMX (TDPBF16PS).

    A tile has 32 inputs. The products of its even and of its odd inputs are summed apart, then both
    sums are added and added to the total: Intel's Software Developer's Manual, volume 2, except
    that denormal numbers are not flushed to 0. Products of two bfloat16 are exact in float32.
    """
    lanes = VECTOR_BYTES // 4
    load_ints, load_pair = _loader(_INT, lanes), _broadcaster(_INT, lanes)

    def add(builder: Any, sums: Sequence[Any], factors: Any, weights: Any) -> list[Any]:
        name, vector = f"llvm.fma.v{lanes}f32", ir.VectorType(_FLOAT, lanes)
        operands = zip(factors, weights, sums, strict=True)
        return [llvm_call(builder, name, *each, returns=vector) for each in operands]

    def reduce(builder: Any, sums: Sequence[Any]) -> Any:
        return builder.fadd(*sums)

    def load(builder: Any, address: Any) -> list[Any]:
        return _halves(builder, load_ints(builder, address))

    def load_row(builder: Any, address: Any) -> list[Any]:
        return _halves(builder, load_pair(builder, address))

    return Microkernel(2, 4, VECTOR_BYTES, 2, _FLOAT, load, load_row, add, reduce, tile=16)


def _widened_int8(vector_bytes: int) -> Microkernel:
    """int8 weights by int16 rows, four inputs per step: exact, no sum of two products overflows.

    A row has two accumulators per output: for the first and for the last two of the four inputs.
    """
    lanes = vector_bytes // 4  # of int32
    halves = 2
    bytes_type = ir.VectorType(_BYTE, vector_bytes // halves)
    shorts = ir.VectorType(_SHORT, vector_bytes // halves)
    sums_type = ir.VectorType(_INT, lanes)
    name = {32: "llvm.x86.avx2.pmadd.wd", 64: "llvm.x86.avx512.pmaddw.d.512"}[vector_bytes]

    def load(builder: Any, address: Any) -> Any:
        places = [builder.add(address, word(place)) for place in (0, vector_bytes // halves)]
        loaded = [builder.load(pointer(bytes_type)(builder, place), align=4) for place in places]
        return [builder.sext(each, shorts) for each in loaded]

    def add(builder: Any, sums: Sequence[Any], factors: Any, weights: Any) -> list[Any]:
        return [
            builder.add(each, llvm_call(builder, name, factors, weight, returns=sums_type))
            for each, weight in zip(sums, weights, strict=True)
        ]

    def reduce(builder: Any, sums: Sequence[Any]) -> Any:
        first, second = (
            ir.Constant(sums_type, list(range(start, 2 * lanes, 2))) for start in (0, 1)
        )
        return builder.add(
            builder.shuffle_vector(*sums, first), builder.shuffle_vector(*sums, second)
        )

    load_row = _broadcaster(_WORD, vector_bytes // 8, shorts)
    return Microkernel(4, 8, vector_bytes, halves, _INT, load, load_row, add, reduce)


FLOAT32 = _float32()
WIDENED_BFLOAT16, TILED_BFLOAT16 = _widened_bfloat16(), _tiled_bfloat16()
# One instruction each: bfloat16 pairs to float32; uint8 by int8 quads to int32.
DOT_BFLOAT16 = _dot(2, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOAT, _BFloat16Type(), 64)
_VNNI_BYTES = 64 if HAS_AVX512 else 32
DOT_INT8 = _dot(4, f"llvm.x86.avx512.vpdpbusd.{8 * _VNNI_BYTES}", _INT, _BYTE, _VNNI_BYTES)
WIDENED_INT8 = _widened_int8(_VNNI_BYTES)
