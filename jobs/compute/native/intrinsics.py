"""What numba lacks: addresses, calls by address, and sums in an order that never changes.

numba makes scalar loops fast where no order of a sum is in the way. Where one is, the loop is
written here in LLVM's language, for lanes that are always the same: the bits of a sum depend on
neither the compiler nor the place where it is used. Addresses are int64; lengths count numbers and
are multiples of LANES."""

from __future__ import annotations

import platform
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
# What numba makes of a function has other arguments than the function.
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _intrinsic

# What numba compiles for, which need not be all that the processor has: for processors that LLVM
# has no name for, in virtual machines, it leaves out AVX; and NUMBA_CPU_NAME and NUMBA_CPU_FEATURES
# may ask for less. LLVM ends the process for an instruction that it may not use.
_, CPU, _features = cpu_target.target_context.codegen().magic_tuple()
FEATURES = frozenset(
    name[1:] for name in _features.split(",") if name.startswith("+")
)  # LLVM's names
IS_X86 = platform.machine() in ("AMD64", "x86_64")
HAS_AVX2 = {"avx2", "fma"} <= FEATURES
HAS_AVX512 = {"avx512f", "avx512bw", "avx512vl"} <= FEATURES
VECTOR_BYTES = 64 if HAS_AVX512 else 32 if HAS_AVX2 else 16
REGISTERS = 16 if IS_X86 and not HAS_AVX512 else 32  # of vectors
HAS_VNNI = HAS_AVX512 and "avx512vnni" in FEATURES
HAS_AVX_VNNI = "avxvnni" in FEATURES  # the same on 256 bits, without AVX-512
HAS_BFLOAT16 = HAS_AVX512 and "avx512bf16" in FEATURES


_FLOAT, _INT, _WORD, _BYTE = ir.FloatType(), ir.IntType(32), ir.IntType(64), ir.IntType(8)
_ROW = ir.VectorType(_FLOAT, LANES)

Typed = tuple[Any, Callable[..., Any]]


def typed(emit: Callable[..., Any], returns: Any, *takes: Any) -> Typed:
    """Return the signature of an intrinsic and its code generator, as numba expects them."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        value = emit(builder, *values)
        return context.get_dummy_value() if value is None else value

    return returns(*takes), generate


def pointer(of: Any) -> Callable[..., Any]:
    return lambda builder, address: builder.inttoptr(address, of.as_pointer())


def _view(element: Any, of: Any) -> Callable[..., Any]:
    """Make the intrinsic that takes an address and returns a C pointer to numbers of a type."""

    @intrinsic
    def view(typing: Any, address: Any) -> Typed:
        return typed(pointer(of), types.CPointer(element), types.int64)

    return view


floats = _view(types.float32, _FLOAT)
ints = _view(types.int32, _INT)
unsigned = _view(types.uint8, _BYTE)
signed = _view(types.int8, _BYTE)
shorts = _view(types.uint16, ir.IntType(16))
words = _view(types.int64, _WORD)


@intrinsic
def address_of(typing: Any, data: Any) -> Typed:
    """The address that a C pointer holds."""

    def emit(builder: Any, data: Any) -> Any:
        return builder.ptrtoint(data, _WORD)

    return typed(emit, types.int64, types.voidptr)


@intrinsic
def call(typing: Any, address: Any) -> Typed:
    """Call a C function that takes nothing and returns an int."""

    def emit(builder: Any, address: Any) -> Any:
        function = ir.FunctionType(_INT, []).as_pointer()
        return builder.call(builder.inttoptr(address, function), [])

    return typed(emit, types.int32, types.int64)


@intrinsic
def add_to(typing: Any, address: Any, value: Any) -> Typed:
    """Add to an int64 that several threads add to; return what it was."""

    def emit(builder: Any, address: Any, value: Any) -> Any:
        return builder.atomic_rmw("add", pointer(_WORD)(builder, address), value, "monotonic")

    return typed(emit, types.int64, types.int64, types.int64)


@intrinsic
def fma(typing: Any, a: Any, b: Any, c: Any) -> Typed:
    """a * b + c, rounded once."""

    def emit(builder: Any, *factors: Any) -> Any:
        return builder.call(_function(builder, "fma", _FLOAT, 3), factors)

    return typed(emit, types.float32, types.float32, types.float32, types.float32)


@intrinsic
def float_of(typing: Any, bits: Any) -> Typed:
    """The float32 of these bits, an int32."""

    def emit(builder: Any, bits: Any) -> Any:
        return builder.bitcast(bits, _FLOAT)

    return typed(emit, types.float32, types.int32)


@intrinsic
def bits_of(typing: Any, value: Any) -> Typed:
    """The bits of a float32, an int32."""

    def emit(builder: Any, value: Any) -> Any:
        return builder.bitcast(value, _INT)

    return typed(emit, types.int32, types.float32)


@intrinsic
def dot(typing: Any, a: Any, b: Any, length: Any) -> Typed:
    """The sum of a[i] b[i], of float32 at two addresses."""

    def emit(builder: Any, a: Any, b: Any, length: Any) -> Any:
        def step(index: Any, sums: Sequence[Any]) -> list[Any]:
            factors = _lanes_at(builder, a, index), _lanes_at(builder, b, index)
            return [builder.call(_function(builder, "fma", _ROW, 3), [*factors, *sums])]

        (sums,) = over(builder, length, LANES, [ir.Constant(_ROW, [0.0] * LANES)], step)
        return _folded(builder, sums, builder.fadd)

    return typed(emit, types.float32, types.int64, types.int64, types.int64)


@intrinsic
def sum_of(typing: Any, a: Any, length: Any) -> Typed:
    """The sum of float32 at an address."""

    def emit(builder: Any, a: Any, length: Any) -> Any:
        def step(index: Any, sums: Sequence[Any]) -> list[Any]:
            return [builder.fadd(*sums, _lanes_at(builder, a, index))]

        (sums,) = over(builder, length, LANES, [ir.Constant(_ROW, [0.0] * LANES)], step)
        return _folded(builder, sums, builder.fadd)

    return typed(emit, types.float32, types.int64, types.int64)


@intrinsic
def max_of(typing: Any, a: Any, length: Any) -> Typed:
    """The largest float32 at an address; NaN if one is."""
    return typed(_largest(lambda builder, lanes: lanes), types.float32, types.int64, types.int64)


@intrinsic
def abs_max_of(typing: Any, a: Any, length: Any) -> Typed:
    """The largest absolute float32 at an address; NaN if one is."""

    def absolute(builder: Any, lanes: Any) -> Any:
        return builder.call(_function(builder, "fabs", _ROW, 1), [lanes])

    return typed(_largest(absolute), types.float32, types.int64, types.int64)


def _largest(of: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def emit(builder: Any, a: Any, length: Any) -> Any:
        def larger(one: Any, other: Any) -> Any:
            return builder.call(_function(builder, "maximum", one.type, 2), [one, other])

        def step(index: Any, found: Sequence[Any]) -> list[Any]:
            return [larger(of(builder, _lanes_at(builder, a, index)), *found)]

        least = ir.Constant(_ROW, [float("-inf")] * LANES)
        (found,) = over(builder, length, LANES, [least], step)
        return _folded(builder, found, larger)

    return emit


def over(
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
    last = builder.block  # another one than `loop` where a step has loops of its own
    index.add_incoming(following, last)
    for value, at_first, then in zip(values, first, found, strict=True):
        value.add_incoming(at_first, before)
        value.add_incoming(then, last)
    builder.cbranch(builder.icmp_signed("<", following, end), loop, done)
    builder.position_at_end(done)
    return found


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


def splat(builder: Any, value: Any, width: int) -> Any:
    none = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = builder.insert_element(none, value, ir.Constant(_INT, 0))
    every = ir.Constant(ir.VectorType(_INT, width), [0] * width)
    return builder.shuffle_vector(first, none, every)


def _function(builder: Any, name: str, of: Any, count: int) -> Any:
    """LLVM's own function of that many values of a type."""
    suffix = f"v{of.count}f32" if isinstance(of, ir.VectorType) else "f32"
    signature = ir.FunctionType(of, [of] * count)
    return cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
