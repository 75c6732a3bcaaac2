"""Register-blocked inner loops of matrix multiplication, one for each form of the weights.

A kernel computes up to GROUP rows by the outputs of one packed panel. Its sums stay in vector
registers and are added up in the order of the inputs, so the same row gives the same bits whatever
rows are computed with it. How wide a panel is follows from the registers that the processor has:
weights are loaded once for all rows of a group, and a panel is one stream of memory.

Blocking: Goto and van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008). int8
without VNNI widens to int16, whose pairwise products (pmaddwd) are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .intrinsics import (
    HAS_AVX512,
    LINE,
    REGISTERS,
    VECTOR_BYTES,
    Typed,
    intrinsic,
    over,
    pointer,
    splat,
    typed,
)

GROUP = 6  # rows of a pass at most

_FLOAT, _INT, _WORD, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
_SHORT = ir.IntType(16)
_OUTPUT_BYTES = 4  # of weights for an output at a step, and of its sum
_SUM_REGISTERS = REGISTERS * 3 // 4  # the others hold weights and inputs
_UPPER_HALF = -(1 << 16)


class _BFloat16Type(ir.types.Type):  # type: ignore[misc, unused-ignore]
    """bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


@dataclass(frozen=True)
class Kind:
    """How one step multiplies: `depth` inputs of a row by 4 bytes of weights for each output."""

    depth: int
    row_bytes: int  # of a row at a step
    vector_bytes: int  # of weights that are multiplied at once
    sums: int  # registers that these need for a row
    sum: ir.Type
    load: Callable[[Any, Any], Any]  # (builder, address of weights) -> weights
    load_row: Callable[[Any, Any], Any]  # (builder, address in a row) -> factors
    add: Callable[[Any, Sequence[Any], Any, Any], list[Any]]  # sums + factors * weights
    fold: Callable[[Any, Sequence[Any]], Any]  # the registers of a row as one sum per output

    @property
    def panel(self) -> int:
        """Outputs whose weights lie side by side: as many as GROUP rows have registers for."""
        vectors = max(1, _SUM_REGISTERS // (GROUP * self.sums))
        return vectors * self.vector_bytes // _OUTPUT_BYTES


def gemm(kind: Kind, panel: int, most: int = GROUP) -> Any:
    """Return a function
    (count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched):

    y[row, n] = the sum of x[row, k] w[k / depth, n, k % depth] for k from `begin` to `end`; n is
    below `panel` and row below `count`, from 1 to `most`. There is at least one step. Strides are
    in bytes: between rows, and between the steps of w.

    Each step prefetches half as many bytes as it reads of w, or a line: the first one from `ahead`
    on, the next ones `fetched` bytes further each; 0 to prefetch nothing new.
    """
    lanes = kind.vector_bytes // _OUTPUT_BYTES
    panel_bytes = panel * _OUTPUT_BYTES  # of weights at a step, and of sums
    fetched_bytes = max(LINE, panel_bytes // 2)  # two groups of rows fetch a half each
    sums_type = ir.VectorType(kind.sum, lanes)
    places = [_word(place) for place in range(0, panel_bytes, kind.vector_bytes)]

    def emit(
        builder: Any, count: int, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, stride: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
    ) -> None:  # fmt: skip
        rows = _rows(builder, x, x_stride, count)
        depth = _word(kind.depth)
        first, last = builder.sdiv(begin, depth), builder.sdiv(end, depth)

        def step(number: Any, sums: Sequence[Any]) -> list[Any]:
            done = builder.mul(builder.sub(number, first), fetched)
            _prefetch(builder, builder.add(ahead, done), fetched_bytes)
            place = builder.add(w, builder.mul(number, stride))
            weights = [kind.load(builder, builder.add(place, part)) for part in places]
            in_row = builder.mul(number, _word(kind.row_bytes))
            factors = [kind.load_row(builder, builder.add(row, in_row)) for row in rows]
            pairs = [(factor, weight) for factor in factors for weight in weights]
            return [
                total
                for index, pair in enumerate(pairs)
                for total in kind.add(builder, _part(sums, index, kind.sums), *pair)
            ]

        zeros = [ir.Constant(sums_type, [0] * lanes)] * (count * len(places) * kind.sums)
        sums = over(builder, last, 1, zeros, step, first)
        targets = [
            builder.add(row, part) for row in _rows(builder, y, y_stride, count) for part in places
        ]
        for index, target in enumerate(targets):
            folded = kind.fold(builder, _part(sums, index, kind.sums))
            builder.store(folded, pointer(sums_type)(builder, target), align=_OUTPUT_BYTES)

    @intrinsic
    def gemm_of_rows(
        typing: Any, count: Any, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, stride: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
    ) -> Typed:  # fmt: skip
        return typed(_by_count(emit, most), types.void, *(types.int64,) * 11)

    return gemm_of_rows


def _part(values: Sequence[Any], index: int, size: int) -> Sequence[Any]:
    return values[index * size : (index + 1) * size]


def _by_count(emit: Callable[..., None], most: int) -> Callable[..., None]:
    """Emit code for each count from 1 to `most`."""

    def emit_all(builder: Any, count: Any, *values: Any) -> None:
        done = builder.append_basic_block("done")
        choice = builder.switch(count, done)
        for number in range(1, most + 1):
            case = builder.append_basic_block(f"rows_{number}")
            choice.add_case(_word(number), case)
            builder.position_at_end(case)
            emit(builder, number, *values)
            builder.branch(done)
        builder.position_at_end(done)

    return emit_all


def _prefetch(builder: Any, address: Any, num_bytes: int) -> None:
    """Have so many bytes brought into the second level of caches."""
    byte = _BYTE.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], signature)
    reading, second_level, data = (ir.Constant(_INT, value) for value in (0, 2, 1))
    for line in range(0, num_bytes, LINE):
        place = builder.add(address, _word(line))
        builder.call(function, [builder.inttoptr(place, byte), reading, second_level, data])


def _rows(builder: Any, first: Any, stride: Any, count: int) -> list[Any]:
    rows = [first]
    while len(rows) < count:
        rows.append(builder.add(rows[-1], stride))
    return rows


def _word(value: int) -> Any:
    return ir.Constant(_WORD, value)


# --- The kinds --------------------------------------------------------------------------------


def _loader(of: Any, lanes: int) -> Callable[[Any, Any], Any]:
    """Load a vector from an address that is aligned like one of its elements of 4 bytes."""

    def load(builder: Any, address: Any) -> Any:
        return builder.load(pointer(ir.VectorType(of, lanes))(builder, address), align=4)

    return load


def _broadcaster(of: Any, lanes: int, as_type: Any = None) -> Callable[[Any, Any], Any]:
    """Load one element and give it to every lane."""

    def load_row(builder: Any, address: Any) -> Any:
        value = splat(builder, builder.load(pointer(of)(builder, address), align=4), lanes)
        return value if as_type is None else builder.bitcast(value, as_type)

    return load_row


def _only(builder: Any, sums: Sequence[Any]) -> Any:
    (one,) = sums
    return one


def _call(builder: Any, name: str, *values: Any, returns: Any) -> Any:
    signature = ir.FunctionType(returns, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)


def _float32() -> Kind:
    lanes = VECTOR_BYTES // 4
    vector = ir.VectorType(_FLOAT, lanes)

    def add(builder: Any, sums: Sequence[Any], factor: Any, weight: Any) -> list[Any]:
        name = f"llvm.fma.v{lanes}f32"
        return [_call(builder, name, factor, weight, *sums, returns=vector)]

    return Kind(
        1, 4, VECTOR_BYTES, 1, _FLOAT, _loader(_FLOAT, lanes), _broadcaster(_FLOAT, lanes), add,
        _only,
    )  # fmt: skip


def _dot(depth: int, name: str, total: Any, factor: Any, vector_bytes: int) -> Kind:
    """One instruction that multiplies `depth` inputs and adds them up: `name(sums, x, w)`."""
    lanes = vector_bytes // 4
    factors, sums_type = ir.VectorType(factor, depth * lanes), ir.VectorType(total, lanes)

    def add(builder: Any, sums: Sequence[Any], x: Any, weight: Any) -> list[Any]:
        given = [*sums, *(builder.bitcast(each, factors) for each in (x, weight))]
        return [_call(builder, name, *given, returns=sums_type)]

    return Kind(
        depth, 4, vector_bytes, 1, total, _loader(_INT, lanes), _broadcaster(_INT, lanes), add,
        _only,
    )  # fmt: skip


def _widened_bfloat16() -> Kind:
    """bfloat16 weights in pairs of inputs, by float32 rows: a bfloat16 is the upper half of one."""
    lanes = VECTOR_BYTES // 4
    vector = ir.VectorType(_FLOAT, lanes)
    load_ints, load_float = _loader(_INT, lanes), _broadcaster(_FLOAT, lanes)

    def load(builder: Any, address: Any) -> Any:
        pairs = load_ints(builder, address)
        shift, mask = (ir.Constant(pairs.type, [value] * lanes) for value in (16, _UPPER_HALF))
        return [
            builder.bitcast(half, vector)
            for half in (builder.shl(pairs, shift), builder.and_(pairs, mask))
        ]

    def load_row(builder: Any, address: Any) -> Any:
        return [load_float(builder, builder.add(address, _word(place))) for place in (0, 4)]

    def add(builder: Any, sums: Sequence[Any], factors: Any, weights: Any) -> list[Any]:
        (total,) = sums
        for factor, weight in zip(factors, weights, strict=True):
            name = f"llvm.fma.v{lanes}f32"
            total = _call(builder, name, factor, weight, total, returns=vector)
        return [total]

    return Kind(2, 8, VECTOR_BYTES, 1, _FLOAT, load, load_row, add, _only)


def _widened_int8(vector_bytes: int) -> Kind:
    """int8 weights in quads of inputs, by int16 rows: exact, as no sum of two products overflows.

    A register has two sums for each output, of the first and of the last two inputs of a quad.
    """
    lanes = vector_bytes // 4  # int32, and outputs
    halves = 2
    bytes_type = ir.VectorType(_BYTE, vector_bytes // halves)
    shorts = ir.VectorType(_SHORT, vector_bytes // halves)
    sums_type = ir.VectorType(_INT, lanes)
    name = {32: "llvm.x86.avx2.pmadd.wd", 64: "llvm.x86.avx512.pmaddw.d.512"}[vector_bytes]

    def load(builder: Any, address: Any) -> Any:
        places = [builder.add(address, _word(place)) for place in (0, vector_bytes // halves)]
        loaded = [builder.load(pointer(bytes_type)(builder, place), align=4) for place in places]
        return [builder.sext(each, shorts) for each in loaded]

    def add(builder: Any, sums: Sequence[Any], factors: Any, weights: Any) -> list[Any]:
        return [
            builder.add(each, _call(builder, name, factors, weight, returns=sums_type))
            for each, weight in zip(sums, weights, strict=True)
        ]

    def fold(builder: Any, sums: Sequence[Any]) -> Any:
        first, second = (
            ir.Constant(sums_type, list(range(start, 2 * lanes, 2))) for start in (0, 1)
        )
        return builder.add(
            builder.shuffle_vector(*sums, first), builder.shuffle_vector(*sums, second)
        )

    load_row = _broadcaster(_WORD, vector_bytes // 8, shorts)
    return Kind(4, 8, vector_bytes, halves, _INT, load, load_row, add, fold)


FLOAT32 = _float32()
WIDENED_BFLOAT16 = _widened_bfloat16()
# To float32, and of uint8 with int8 to int32: an instruction each.
DOT_BFLOAT16 = _dot(2, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOAT, _BFloat16Type(), 64)
_VNNI_BYTES = 64 if HAS_AVX512 else 32
DOT_INT8 = _dot(4, f"llvm.x86.avx512.vpdpbusd.{8 * _VNNI_BYTES}", _INT, _BYTE, _VNNI_BYTES)
WIDENED_INT8 = _widened_int8(_VNNI_BYTES)
