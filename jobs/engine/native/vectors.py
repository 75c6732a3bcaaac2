"""What numba lacks: addresses, calls by address, and sums in an order that never changes.

numba makes scalar loops fast where no order of a sum is in the way. Where one is, the loop is
written here in LLVM's language, for lanes that are always the same: the bits of a sum depend on
neither the compiler nor the place where it is used. Addresses are int64; lengths count numbers and
are multiples of LANES."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic as _intrinsic

WIDTH = 64  # outputs that oneDNN puts side by side
LANES = 16  # of a sum over a row
LINE = 64  # bytes of a cache
FETCHED = 2 * LINE  # bytes at a time, of a product that follows
# What numba makes of a function has other arguments than the function.
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _intrinsic

# Whether these can be compiled: not all that the processor has need be what numba compiles for. To
# processors that LLVM has no name for, in virtual machines, it gives no AVX; and NUMBA_CPU_NAME and
# others may ask for less. LLVM ends the process for an instruction that it may not use.
_, _, _features = cpu_target.target_context.codegen().magic_tuple()
HAS_QUADS, HAS_PAIRS = (f"+{name}" in _features.split(",") for name in ("avx512vnni", "avx512bf16"))


class _BFloat16Type(ir.types.Type):  # type: ignore[misc, unused-ignore]
    """bfloat16, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"


_FLOAT, _INT, _WORD, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
_ROW = ir.VectorType(_FLOAT, LANES)
_BFLOAT = _BFloat16Type()

_Typed = tuple[Any, Callable[..., Any]]


def _typed(emit: Callable[..., Any], returns: Any, *takes: Any) -> _Typed:
    """What numba asks an intrinsic for: its types, and what emits its code."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value = emit(builder, *values)
        return context.get_dummy_value() if value is None else value

    return returns(*takes), generate


def _pointer(of: Any) -> Callable[..., Any]:
    return lambda builder, address: builder.inttoptr(address, of.as_pointer())


@intrinsic
def floats(typing: Any, address: Any) -> _Typed:
    """What is at an address, as float32."""
    return _typed(_pointer(_FLOAT), types.CPointer(types.float32), types.int64)


@intrinsic
def ints(typing: Any, address: Any) -> _Typed:
    """What is at an address, as int32."""
    return _typed(_pointer(_INT), types.CPointer(types.int32), types.int64)


@intrinsic
def unsigned(typing: Any, address: Any) -> _Typed:
    """What is at an address, as uint8."""
    return _typed(_pointer(_BYTE), types.CPointer(types.uint8), types.int64)


@intrinsic
def shorts(typing: Any, address: Any) -> _Typed:
    """What is at an address, as uint16."""
    return _typed(_pointer(ir.IntType(16)), types.CPointer(types.uint16), types.int64)


@intrinsic
def words(typing: Any, address: Any) -> _Typed:
    """What is at an address, as int64."""
    return _typed(_pointer(_WORD), types.CPointer(types.int64), types.int64)


@intrinsic
def address_of(typing: Any, data: Any) -> _Typed:
    """The address that a C pointer holds."""

    def emit(builder: Any, data: Any) -> Any:
        return builder.ptrtoint(data, _WORD)

    return _typed(emit, types.int64, types.voidptr)


@intrinsic
def call(typing: Any, address: Any) -> _Typed:
    """Call a C function that takes nothing and returns an int."""

    def emit(builder: Any, address: Any) -> Any:
        function = ir.FunctionType(_INT, []).as_pointer()
        return builder.call(builder.inttoptr(address, function), [])

    return _typed(emit, types.int32, types.int64)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> _Typed:
    """a * b + c, rounded once."""

    def emit(builder: Any, *factors: Any) -> Any:
        return builder.call(_function(builder, "fma", _FLOAT, 3), factors)

    return _typed(emit, types.float32, types.float32, types.float32, types.float32)


@intrinsic
def float_of(typing: Any, bits: Any) -> _Typed:
    """The float32 of these bits, an int32."""

    def emit(builder: Any, bits: Any) -> Any:
        return builder.bitcast(bits, _FLOAT)

    return _typed(emit, types.float32, types.int32)


@intrinsic
def bits_of(typing: Any, value: Any) -> _Typed:
    """The bits of a float32, an int32."""

    def emit(builder: Any, value: Any) -> Any:
        return builder.bitcast(value, _INT)

    return _typed(emit, types.int32, types.float32)


@intrinsic
def dot(typing: Any, a: Any, b: Any, length: Any) -> _Typed:
    """The sum of a[i] b[i], of float32 at two addresses."""

    def emit(builder: Any, a: Any, b: Any, length: Any) -> Any:
        def step(index: Any, sums: Sequence[Any]) -> list[Any]:
            factors = _lanes_at(builder, a, index), _lanes_at(builder, b, index)
            return [builder.call(_function(builder, "fma", _ROW, 3), [*factors, *sums])]

        (sums,) = _over(builder, length, LANES, [ir.Constant(_ROW, [0.0] * LANES)], step)
        return _folded(builder, sums, builder.fadd)

    return _typed(emit, types.float32, types.int64, types.int64, types.int64)


@intrinsic
def total(typing: Any, a: Any, length: Any) -> _Typed:
    """The sum of float32 at an address."""

    def emit(builder: Any, a: Any, length: Any) -> Any:
        def step(index: Any, sums: Sequence[Any]) -> list[Any]:
            return [builder.fadd(*sums, _lanes_at(builder, a, index))]

        (sums,) = _over(builder, length, LANES, [ir.Constant(_ROW, [0.0] * LANES)], step)
        return _folded(builder, sums, builder.fadd)

    return _typed(emit, types.float32, types.int64, types.int64)


@intrinsic
def largest(typing: Any, a: Any, length: Any) -> _Typed:
    """The largest float32 at an address; NaN if one is."""
    return _typed(_largest(lambda builder, lanes: lanes), types.float32, types.int64, types.int64)


@intrinsic
def widest(typing: Any, a: Any, length: Any) -> _Typed:
    """The largest absolute float32 at an address; NaN if one is."""

    def absolute(builder: Any, lanes: Any) -> Any:
        return builder.call(_function(builder, "fabs", _ROW, 1), [lanes])

    return _typed(_largest(absolute), types.float32, types.int64, types.int64)


def _largest(of: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def emit(builder: Any, a: Any, length: Any) -> Any:
        def larger(one: Any, other: Any) -> Any:
            return builder.call(_function(builder, "maximum", one.type, 2), [one, other])

        def step(index: Any, found: Sequence[Any]) -> list[Any]:
            return [larger(of(builder, _lanes_at(builder, a, index)), *found)]

        least = ir.Constant(_ROW, [float("-inf")] * LANES)
        (found,) = _over(builder, length, LANES, [least], step)
        return _folded(builder, found, larger)

    return emit


def columns(most: int) -> Any:
    """Return a function of
    (count, y, y_stride, x, x_stride, w, stride, begin, end, ahead, fetched), for 1 to `most` rows:

    y[row, n] = the sum of x[row, k] w[k stride + n] for k from begin to end; n < WIDTH and
    row < count. Strides are those of rows, in bytes but for that of w. There is at least one k.
    Each output is a lane of its own, so the order of its sum is that of k.

    With each step, of four bytes of a row, FETCHED bytes from `ahead` on are brought near to the
    processor, then those that are `fetched` bytes behind them: FETCHED or 0.
    """
    vector = ir.VectorType(_FLOAT, WIDTH)
    zero = ir.Constant(vector, [0.0] * WIDTH)

    def emit(
        builder: Any, count: int, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, stride: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
    ) -> None:  # fmt: skip
        rows = _rows(builder, x, x_stride, count)

        def step(k: Any, sums: Sequence[Any]) -> list[Any]:
            _fetch(builder, ahead, builder.mul(builder.sub(k, begin), fetched))
            place = _at(builder, w, _FLOAT, builder.mul(k, stride))
            weights = builder.load(builder.bitcast(place, vector.as_pointer()), align=4)
            fma_of_all = _function(builder, "fma", vector, 3)
            factors = [builder.load(_at(builder, row, _FLOAT, k)) for row in rows]
            return [
                builder.call(fma_of_all, [_splat(builder, factor, WIDTH), weights, sum_of_row])
                for factor, sum_of_row in zip(factors, sums, strict=True)
            ]

        sums = _over(builder, end, 1, [zero] * count, step, begin)
        for row, sum_of_row in zip(_rows(builder, y, y_stride, count), sums, strict=True):
            builder.store(sum_of_row, builder.inttoptr(row, vector.as_pointer()), align=4)

    @intrinsic
    def columns_of_rows(
        typing: Any, count: Any, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, stride: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
    ) -> _Typed:  # fmt: skip
        return _typed(_by_count(emit, most), types.void, *(types.int64,) * 11)

    return columns_of_rows


def quads(most: int, width: int) -> Any:
    """Return a function of (count, y, y_stride, x, x_stride, w, begin, end, ahead, fetched):

    y[row, n] = the sum of x[row, k] w[k / 4, n, k % 4] for k from begin to end; n < width.
    x: uint8, w: int8, y: int32; strides in bytes. Four products and their sum are one instruction
    of AVX-512 VNNI. The rest is as in `columns`.
    """
    return _groups("llvm.x86.avx512.vpdpbusd.512", most, width, 4, _INT, _BYTE)


def pairs(most: int) -> Any:
    """The same of bfloat16, two at a time, for WIDTH outputs. y: float32."""
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    return _groups(name, most, WIDTH, 2, _FLOAT, _BFLOAT)


def _groups(name: str, most: int, width: int, size: int, to: Any, of: Any) -> Any:
    part = ir.VectorType(to, LANES)
    quarter = ir.VectorType(of, size * LANES)
    loaded = ir.VectorType(_INT, LANES)
    parts = [number * 4 * LANES for number in range(width // LANES)]  # where each begins, in bytes
    zeros = [ir.Constant(part, [0] * LANES)] * len(parts)
    bytes_of_one = 4 // size

    def emit(
        builder: Any, count: int, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
    ) -> None:  # fmt: skip
        signature = ir.FunctionType(part, [part, quarter, quarter])
        product = cgutils.get_or_insert_function(builder.module, signature, name)
        rows = _rows(builder, x, x_stride, count)

        def step(k: Any, sums: Sequence[Any]) -> list[Any]:
            steps = builder.sdiv(builder.sub(k, begin), ir.Constant(_WORD, size))
            _fetch(builder, ahead, builder.mul(steps, fetched))
            of_k = builder.mul(k, ir.Constant(_WORD, bytes_of_one))
            place = builder.add(w, builder.mul(of_k, ir.Constant(_WORD, width)))
            weights = [
                builder.load(_pointer(loaded)(builder, _after(builder, place, begin)), align=4)
                for begin in parts
            ]
            groups = [builder.load(_pointer(_INT)(builder, builder.add(row, of_k))) for row in rows]
            factors = [_splat(builder, group, LANES) for group in groups]
            pairs_of_them = [(factor, weight) for factor in factors for weight in weights]
            return [
                builder.call(
                    product, [sum_of_part, *(builder.bitcast(value, quarter) for value in pair)]
                )
                for sum_of_part, pair in zip(sums, pairs_of_them, strict=True)
            ]

        sums = iter(_over(builder, end, size, zeros * count, step, begin))
        for row in _rows(builder, y, y_stride, count):
            for begin_of_part in parts:
                target = _pointer(part)(builder, _after(builder, row, begin_of_part))
                builder.store(next(sums), target, align=4)

    @intrinsic
    def groups_of_rows(
        typing: Any, count: Any, y: Any, y_stride: Any, x: Any, x_stride: Any,
        w: Any, begin: Any, end: Any, ahead: Any, fetched: Any,
    ) -> _Typed:  # fmt: skip
        return _typed(_by_count(emit, most), types.void, *(types.int64,) * 10)

    return groups_of_rows


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
        place = _after(builder, builder.add(address, offset), line)
        builder.call(function, [builder.inttoptr(place, byte), reading, second_level, data])


def _over(
    builder: Any,
    end: Any,
    stride: int,
    first: Sequence[Any],
    step: Callable[[Any, Sequence[Any]], list[Any]],
    begin: Any = None,
) -> list[Any]:
    """A loop over begin, begin + stride, … until end, at least once; return the last `step`'s."""
    before = builder.block
    loop, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index, values = builder.phi(_WORD), [builder.phi(value.type) for value in first]
    index.add_incoming(ir.Constant(_WORD, 0) if begin is None else begin, before)
    found = step(index, values)
    following = builder.add(index, ir.Constant(_WORD, stride))
    index.add_incoming(following, loop)
    for value, at_first, then in zip(values, first, found, strict=True):
        value.add_incoming(at_first, before)
        value.add_incoming(then, loop)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, done)
    builder.position_at_end(done)
    return found


def _rows(builder: Any, first: Any, stride: Any, count: int) -> list[Any]:
    rows = [first]
    while len(rows) < count:
        rows.append(builder.add(rows[-1], stride))
    return rows


def _after(builder: Any, address: Any, num_bytes: int) -> Any:
    return builder.add(address, ir.Constant(_WORD, num_bytes))


def _folded(builder: Any, lanes: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Join the upper half of lanes to the lower until there is one."""
    width = LANES
    while width > 1:
        width //= 2
        none = ir.Constant(lanes.type, ir.Undefined)
        lower, upper = (
            ir.Constant(ir.VectorType(_INT, width), list(range(first, first + width)))
            for first in (0, width)
        )
        lanes = join(
            builder.shuffle_vector(lanes, none, lower), builder.shuffle_vector(lanes, none, upper)
        )
    return builder.extract_element(lanes, ir.Constant(_INT, 0))


def _lanes_at(builder: Any, address: Any, index: Any) -> Any:
    place = builder.bitcast(_at(builder, address, _FLOAT, index), _ROW.as_pointer())
    return builder.load(place, align=4)


def _at(builder: Any, address: Any, of: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, of.as_pointer()), [index])


def _splat(builder: Any, value: Any, width: int) -> Any:
    none = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = builder.insert_element(none, value, ir.Constant(_INT, 0))
    every = ir.Constant(ir.VectorType(_INT, width), [0] * width)
    return builder.shuffle_vector(first, none, every)


def _function(builder: Any, name: str, of: Any, count: int) -> Any:
    """LLVM's own function of that many values of a type."""
    suffix = f"v{of.count}f32" if isinstance(of, ir.VectorType) else "f32"
    signature = ir.FunctionType(of, [of] * count)
    return cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
