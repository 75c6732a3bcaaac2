"""Operations that numba lacks: memory addresses, calls by address, reductions in a fixed order.

numba vectorizes scalar loops, but not floating-point reductions, whose result depends on the order.
These are written here in LLVM IR with a fixed number of lanes, so that the bits of a sum depend on
neither the compiler nor the caller. Addresses are int64; lengths count numbers and are multiples of
LANES.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic as _intrinsic

WIDTH = 64  # outputs per block, as in oneDNN's packing
LANES = 16  # partial sums of a reduction
LINE = 64  # bytes of a cache line
# Typed loosely: the decorated function has no typing context among its arguments.
intrinsic: Callable[[Callable[..., Any]], Callable[..., Any]] = _intrinsic

# The instruction sets that numba compiles for. They can be fewer than the processor has: numba
# leaves out AVX on processors without a name in LLVM, as in some virtual machines, and
# NUMBA_CPU_NAME and NUMBA_CPU_FEATURES restrict them. LLVM aborts the process on an instruction
# outside of them.
_, CPU, _features = cpu_target.target_context.codegen().magic_tuple()
FEATURES = frozenset(
    name[1:] for name in _features.split(",") if name.startswith("+")
)  # LLVM's names
IS_X86 = platform.machine() in ("AMD64", "x86_64")
HAS_AVX2 = {"avx2", "fma"} <= FEATURES
HAS_AVX512 = {"avx512f", "avx512bw", "avx512vl"} <= FEATURES
VECTOR_BYTES = 64 if HAS_AVX512 else 32 if HAS_AVX2 else 16
REGISTERS = 16 if IS_X86 and not HAS_AVX512 else 32  # vector registers
HAS_VNNI = HAS_AVX512 and "avx512vnni" in FEATURES
HAS_AVX_VNNI = "avxvnni" in FEATURES  # VNNI on 256 bits, without AVX-512
HAS_BFLOAT16 = HAS_AVX512 and "avx512bf16" in FEATURES
HAS_AMX = HAS_BFLOAT16 and "amx-bf16" in FEATURES  # used by oneDNN; gemm.py has its bits


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
    """Return the generator (builder, address) -> LLVM pointer to values of a type."""
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
def fetch_add(typing: Any, address: Any, value: Any) -> Typed:
    """Atomic fetch-and-add on an int64 at an address: return the value before."""

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
    """Reinterpret the bits of an int32 as float32."""

    def emit(builder: Any, bits: Any) -> Any:
        return builder.bitcast(bits, _FLOAT)

    return typed(emit, types.float32, types.int32)


@intrinsic
def bits_of(typing: Any, value: Any) -> Typed:
    """Reinterpret the bits of a float32 as int32."""

    def emit(builder: Any, value: Any) -> Any:
        return builder.bitcast(value, _INT)

    return typed(emit, types.int32, types.float32)


@intrinsic
def dot(typing: Any, a: Any, b: Any, length: Any) -> Typed:
    """Dot product of float32 at two addresses."""

    def emit(builder: Any, a: Any, b: Any, length: Any) -> Any:
        def step(index: Any, sums: Sequence[Any]) -> list[Any]:
            factors = _lanes_at(builder, a, index), _lanes_at(builder, b, index)
            return [builder.call(_function(builder, "fma", _ROW, 3), [*factors, *sums])]

        (sums,) = loop(builder, length, LANES, [ir.Constant(_ROW, [0.0] * LANES)], step)
        return _reduced(builder, sums, builder.fadd)

    return typed(emit, types.float32, types.int64, types.int64, types.int64)


@intrinsic
def sum_of(typing: Any, a: Any, length: Any) -> Typed:
    """The sum of float32 at an address."""

    def emit(builder: Any, a: Any, length: Any) -> Any:
        def step(index: Any, sums: Sequence[Any]) -> list[Any]:
            return [builder.fadd(*sums, _lanes_at(builder, a, index))]

        (sums,) = loop(builder, length, LANES, [ir.Constant(_ROW, [0.0] * LANES)], step)
        return _reduced(builder, sums, builder.fadd)

    return typed(emit, types.float32, types.int64, types.int64)


@intrinsic
def max_of(typing: Any, a: Any, length: Any) -> Typed:
    """The largest float32 at an address; NaN if any is NaN."""
    return typed(_largest(lambda builder, lanes: lanes), types.float32, types.int64, types.int64)


@intrinsic
def abs_max_of(typing: Any, a: Any, length: Any) -> Typed:
    """The largest absolute float32 at an address; NaN if any is NaN."""

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
        (found,) = loop(builder, length, LANES, [least], step)
        return _reduced(builder, found, larger)

    return emit


def loop(
    builder: Any,
    end: Any,
    stride: int,
    first: Sequence[Any],
    step: Callable[[Any, Sequence[Any]], list[Any]],
    begin: Any = None,
) -> list[Any]:
    """Emit a loop over begin, begin + stride, … below `end`, with at least one iteration.

    `first`: the values before the loop; `step`: (index, values) -> the next values. Returns the
    values of the last iteration.
    """
    before = builder.block
    body, done = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(body)
    builder.position_at_end(body)
    index, values = builder.phi(_WORD), [builder.phi(value.type) for value in first]
    index.add_incoming(ir.Constant(_WORD, 0) if begin is None else begin, before)
    found = step(index, values)
    following = builder.add(index, ir.Constant(_WORD, stride))
    last = builder.block  # not `body` if `step` emitted a loop
    index.add_incoming(following, last)
    for value, at_first, then in zip(values, first, found, strict=True):
        value.add_incoming(at_first, before)
        value.add_incoming(then, last)
    builder.cbranch(builder.icmp_signed("<", following, end), body, done)
    builder.position_at_end(done)
    return found


def _reduced(builder: Any, lanes: Any, join: Callable[[Any, Any], Any]) -> Any:
    """Reduce lanes to one value: join the upper half to the lower, repeatedly."""
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
    """Broadcast a value to a vector of `width` lanes."""
    none = ir.Constant(ir.VectorType(value.type, width), ir.Undefined)
    first = builder.insert_element(none, value, ir.Constant(_INT, 0))
    every = ir.Constant(ir.VectorType(_INT, width), [0] * width)
    return builder.shuffle_vector(first, none, every)


def _function(builder: Any, name: str, of: Any, count: int) -> Any:
    """Declare LLVM's intrinsic of `count` values of a type."""
    suffix = f"v{of.count}f32" if isinstance(of, ir.VectorType) else "f32"
    signature = ir.FunctionType(of, [of] * count)
    return cgutils.get_or_insert_function(builder.module, signature, f"llvm.{name}.{suffix}")
