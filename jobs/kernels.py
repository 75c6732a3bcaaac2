"""Faster kernels for what training on a CPU spends its time in; they give the same numbers.

torch multiplies float32 matrices by MKL, which leaves the AVX-512 units of processors that are not
Intel's alone: there oneDNN, which torch has on board too, is nearly twice as fast. And torch draws
the masks of dropout one element after another, six times slower than need be.

`fast_kernels` puts others in their place in the whole process, for every model and in the backward
pass too. Imports torch: only `run` of a kind imports it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, library as operators

# Below these the call itself is what costs. One row or column is the work of memory alone.
MIN_PRODUCT = 2**16  # multiplications
MIN_SIDE = 2  # rows, columns and depth
MIN_DRAWN = 2**12  # elements
_LANES = 4  # of 16 bits in a random number of 64
_ONE = 2**16

_lock = threading.Lock()  # of what follows: a resident horse runs several jobs
_depth = 0  # of the calls of `fast_kernels` that are open
_overrides: Any = None  # what the first of them has put in place


@contextmanager
def fast_kernels(*, onednn: bool | None = None) -> Iterator[None]:
    """Use the kernels of this module for a while, where the processor gains by them.

    What it decides by never changes on a machine: a job that is resumed there computes as before.
    `onednn` decides for it about the products.
    """
    global _depth, _overrides
    with _lock:
        if _depth == 0:
            _overrides = _install(prefers_onednn() if onednn is None else onednn)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _overrides._destroy()
                _overrides = None


def prefers_onednn() -> bool:
    """Whether this processor has AVX-512 and is not Intel's, and torch has oneDNN."""
    backends: Any = torch.backends  # its functions have no types
    if not (backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    try:
        is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    return not is_intel and backends.cpu.get_cpu_capability() == "AVX512"


def _install(onednn: bool) -> Any:
    kernels: dict[str, Any] = {"bernoulli_.float": _bernoulli}
    if onednn:
        kernels |= {"mm": _mm, "addmm": _addmm}
    # All of torch's before the first is replaced: later they would be found to be these.
    stock = {name: operators.get_kernel(f"aten::{name}", "CPU") for name in kernels}
    overrides = cast(Any, operators).Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name, kernel in kernels.items():
            bound = partial(kernel, stock[name])
            overrides.impl(name, bound, "CPU", with_keyset=True, allow_override=True)
    return overrides


# The kernels. `stock` is the one that each stands in for, and is handed what it is not for; `keys`
# is what torch's dispatcher goes by.


def _mm(stock: Any, keys: Any, a: Tensor, b: Tensor) -> Tensor:
    if _is_worth_it(a, b):
        return _product(a, b, None)
    product: Tensor = stock.call_boxed(keys, a, b)
    return product


def _addmm(
    stock: Any, keys: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if beta == alpha == 1 and bias.shape == b.shape[1:] and _is_worth_it(a, b):
        return _product(a, b, bias)
    total: Tensor = stock.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)
    return total


def _is_worth_it(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not torch.float32:
        return False
    (rows, depth), columns = a.shape, b.shape[1]
    return min(rows, depth, columns) >= MIN_SIDE and rows * depth * columns >= MIN_PRODUCT


def _product(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.shape[1] != b.shape[0] or b.dtype is not a.dtype:
        raise RuntimeError(f"matrices {tuple(a.shape)} and {tuple(b.shape)} of {b.dtype}")
    # Of the products of oneDNN the one that takes any strides.
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", [], "")
    return product


def _bernoulli(
    stock: Any, keys: Any, out: Tensor, p: float = 0.5, *, generator: torch.Generator | None = None
) -> Tensor:
    """Fill `out` with ones, of probability p rounded to a 65,536th, and zeros.

    Four elements are cut out of each 64-bit number of the generator.
    """
    if out.dtype is not torch.float32 or not out.is_contiguous() or out.numel() < MIN_DRAWN:
        drawn: Tensor = stock.call_boxed(keys, out, p, generator=generator)
        return drawn
    if not 0 <= p <= 1:
        raise RuntimeError(f"p must be from 0 to 1, got {p}")
    below = round(p * _ONE) - _ONE // 2  # of the numbers from -32,768 to 32,767
    if below == _ONE // 2:
        return out.fill_(1)
    bits = torch.empty(-(-out.numel() // _LANES), dtype=torch.int64)
    bits.random_(-(2**63), None, generator=generator)
    return torch.lt(bits.view(torch.int16)[: out.numel()].view(out.shape), below, out=out)
