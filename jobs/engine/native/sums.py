"""The inner loops of the products: their sums stay in registers, each in an order of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from .vectors import LANES, LINE, Typed, intrinsic, over, pointer, splat, typed

FETCHED = 2 * LINE  # bytes at a time, of a product that follows

_FLOAT, _INT, _WORD, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)


class _BFloat16Type(ir.types.Type):  # type: ignore[misc, unused-ignore]
    """bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


@dataclass(frozen=True)
class Kind:
    """What is multiplied: at each step a lane adds up `size` products, of 4 bytes of a row."""

    size: int
    function: str  # LLVM's: (sums, factors, weights), or the sums last
    sum: ir.Type
    factor: ir.Type
    has_sums_last: bool = False


FLOAT32 = Kind(1, f"llvm.fma.v{LANES}f32", _FLOAT, _FLOAT, has_sums_last=True)
# To float32, and of uint8 with int8 to int32: an instruction each.
BFLOAT16 = Kind(2, "llvm.x86.avx512bf16.dpbf16ps.512", _FLOAT, _BFloat16Type())
INT8 = Kind(4, "llvm.x86.avx512.vpdpbusd.512", _INT, _BYTE)


def products(kind: Kind, width: int, most: int) -> Any:
    """Return a function of
    (count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched):

    y[row, n] = the sum of x[row, k] w[k / size, n, k % size] for k from `begin` to `end`; n < width
    and row < count, from 1 to `most`. There is at least one step. Strides are in bytes: between
    rows, and between the steps of w.

    Each step fetches FETCHED bytes, too: the first one from `ahead` on, the next ones `fetched`
    bytes further each; that is FETCHED, or 0 to fetch nothing.
    """
    sums_type = ir.VectorType(kind.sum, LANES)
    factors_type = ir.VectorType(kind.factor, kind.size * LANES)
    loaded = ir.VectorType(_INT, LANES)
    parts = [ir.Constant(_WORD, place) for place in range(0, width * 4, LINE)]
    takes = [sums_type, factors_type, factors_type]
    if kind.has_sums_last:
        takes.append(takes.pop(0))

    def emit(
        builder: Any, count: int, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, stride: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
    ) -> None:  # fmt: skip
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(sums_type, takes), kind.function
        )
        rows = _rows(builder, x, x_stride, count)
        size = ir.Constant(_WORD, kind.size)
        first, last = builder.sdiv(begin, size), builder.sdiv(end, size)

        def add(sums: Any, factors: Any, weights: Any) -> Any:
            given = [sums, *(builder.bitcast(each, factors_type) for each in (factors, weights))]
            if kind.has_sums_last:
                given.append(given.pop(0))
            return builder.call(function, given)

        def step(number: Any, sums: Sequence[Any]) -> list[Any]:
            _fetch(builder, ahead, builder.mul(builder.sub(number, first), fetched))
            place = builder.add(w, builder.mul(number, stride))
            weights = [
                builder.load(pointer(loaded)(builder, builder.add(place, part)), align=4)
                for part in parts
            ]
            in_row = builder.mul(number, ir.Constant(_WORD, 4))
            factors = [
                splat(
                    builder, builder.load(pointer(_INT)(builder, builder.add(row, in_row))), LANES
                )
                for row in rows
            ]
            pairs = [(factor, weight) for factor in factors for weight in weights]
            return [add(each, *pair) for each, pair in zip(sums, pairs, strict=True)]

        zeros = [ir.Constant(sums_type, [0] * LANES)] * (count * len(parts))
        sums = iter(over(builder, last, 1, zeros, step, first))
        for row in _rows(builder, y, y_stride, count):
            for part in parts:
                target = pointer(sums_type)(builder, builder.add(row, part))
                builder.store(next(sums), target, align=4)

    @intrinsic
    def products_of_rows(
        typing: Any, count: Any, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, stride: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
    ) -> Typed:  # fmt: skip
        return typed(_by_count(emit, most), types.void, *(types.int64,) * 11)

    return products_of_rows


def _by_count(emit: Callable[..., None], most: int) -> Callable[..., None]:
    """Emit code for each count from 1 to `most`, whose sums then all lie in registers."""

    def emit_all(builder: Any, count: Any, *values: Any) -> None:
        done = builder.append_basic_block("done")
        choice = builder.switch(count, done)
        for number in range(1, most + 1):
            case = builder.append_basic_block(f"rows_{number}")
            choice.add_case(ir.Constant(_WORD, number), case)
            builder.position_at_end(case)
            emit(builder, number, *values)
            builder.branch(done)
        builder.position_at_end(done)

    return emit_all


def _fetch(builder: Any, address: Any, offset: Any) -> None:
    """Have FETCHED bytes brought into the second level of caches."""
    byte = _BYTE.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], signature)
    reading, second_level, data = (ir.Constant(_INT, value) for value in (0, 2, 1))
    for line in range(0, FETCHED, LINE):
        place = builder.add(builder.add(address, offset), ir.Constant(_WORD, line))
        builder.call(function, [builder.inttoptr(place, byte), reading, second_level, data])


def _rows(builder: Any, first: Any, stride: Any, count: int) -> list[Any]:
    rows = [first]
    while len(rows) < count:
        rows.append(builder.add(rows[-1], stride))
    return rows
