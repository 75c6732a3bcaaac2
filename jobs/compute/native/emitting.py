"""Code generators that the microkernels share, in LLVM IR: addresses, prefetches, rows, calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .intrinsics import LINE, pointer, splat

_INT, _WORD, _BYTE = ir.IntType(32), ir.IntType(64), ir.IntType(8)


def by_count(emit: Callable[..., None], most: int) -> Callable[..., None]:
    """Emit a switch with unrolled code for each count from 1 to `most`."""

    def emit_all(builder: Any, count: Any, *values: Any) -> None:
        done = builder.append_basic_block("done")
        choice = builder.switch(count, done)
        for number in range(1, most + 1):
            case = builder.append_basic_block(f"rows_{number}")
            choice.add_case(word(number), case)
            builder.position_at_end(case)
            emit(builder, number, *values)
            builder.branch(done)
        builder.position_at_end(done)

    return emit_all


def prefetch(builder: Any, address: Any, num_bytes: int) -> None:
    """Emit prefetches of `num_bytes` at an address into the second-level cache."""
    byte = _BYTE.as_pointer()
    signature = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
    function = builder.module.declare_intrinsic("llvm.prefetch", [byte], signature)
    reading, second_level, data = (ir.Constant(_INT, value) for value in (0, 2, 1))
    for line in range(0, num_bytes, LINE):
        place = builder.add(address, word(line))
        builder.call(function, [builder.inttoptr(place, byte), reading, second_level, data])


def rows_at(builder: Any, first: Any, stride: Any, count: int) -> list[Any]:
    """Return the addresses of `count` rows."""
    rows = [first]
    while len(rows) < count:
        rows.append(builder.add(rows[-1], stride))
    return rows


def load_vector(builder: Any, of: Any, address: Any, *, align: int = 4) -> Any:
    """Load a vector of type `of` from an address."""
    return builder.load(pointer(of)(builder, address), align=align)


def spread(builder: Any, of: Any, address: Any, lanes: int) -> Any:
    """Load one element of type `of` and broadcast it to every lane of a vector."""
    return splat(builder, builder.load(pointer(of)(builder, address), align=4), lanes)


def word(value: int) -> Any:
    """Return a constant of 64 bits."""
    return ir.Constant(_WORD, value)


def llvm_call(builder: Any, name: str, *values: Any, returns: Any) -> Any:
    """Call an intrinsic function of LLVM."""
    signature = ir.FunctionType(returns, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), values)
