"""Overrides of torch's CPU operations that dominate training: mm, addmm and dropout.

GEMM: torch multiplies float32 matrices by MKL, which does not use AVX-512 on AMD processors. oneDNN
(also part of torch) is nearly twice as fast there. The faster one is measured (`levels`).
Dropout: torch draws masks one element at a time; here two elements share a 64-bit random number.

`fast_kernels` overrides them in the whole process, for every model, also in the backward pass.
Results are equal to rounding. For the same seed, dropout masks differ from torch's, with the same
distribution. Imports torch: only `run` of a kind imports this module.
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

from ..files.atomic import write_atomic
from . import onednn as onednn_linear
from .levels import levels

# Smaller GEMMs are left to torch: the call overhead dominates. GEMV is bound by memory bandwidth.
MIN_MULTIPLICATIONS = 2**16
MIN_SIDE = 2  # rows, columns and depth
MIN_DROPPED = 2**12  # elements of an input of dropout
# Dropout with a probability closer to 0 or 1 is left to torch. Here probabilities are rounded to
# multiples of 2^-32, a relative error of at most a millionth.
MIN_PROBABILITY = 2**-12
_LANES = 2  # of 32 bits in a random number of 64
_ONE = 2**32

ONEDNN, TORCH = "onednn", "torch"  # as a job records its choice

_lock = threading.Lock()  # of the two below: a resident horse runs several jobs
_depth = 0  # open calls of `fast_kernels`
_overrides: Any = None  # the handle of their registration, from the first block on


@contextmanager
def fast_kernels(*, onednn: bool | None = None) -> Iterator[None]:
    """Install the overrides of this module in this context.

    `onednn`: whether to use oneDNN's GEMM, if torch has it (None: if measured to be faster). A job
    records its choice and resumes with the same (`recorded_choice`). Of nested or concurrent calls
    the first one's choice counts.
    """
    global _depth, _overrides
    with _lock:
        if _depth == 0:
            _overrides = _install(levels().training == ONEDNN if onednn is None else onednn)
        _depth += 1
    try:
        yield
    finally:
        with _lock:
            _depth -= 1
            if _depth == 0:
                _overrides._destroy()
                _overrides = None


def recorded_choice(path: Path, device: str) -> str:
    """Return the GEMM of a job, ONEDNN or TORCH: the one that its first execution recorded.

    The two round differently, so a job resumes with the one that it began with. Without a record
    the measured choice is written to `path`; on a GPU it is always TORCH.
    """
    if device != "cpu":
        return TORCH
    if not path.exists():
        write_atomic(path, levels().training.encode())
    return path.read_text()


def _install(onednn: bool) -> Any:
    overrides = cast(Any, operators).Library("aten", "IMPL")
    if not hasattr(operators, "get_kernel"):  # torch before 2.9: its own kernels stay
        return overrides
    # (operation, dispatch key, kernel). Dropout is composite, so autograd differentiates it.
    kernels: list[tuple[str, str, Any]] = [
        ("dropout", "CPU", _dropout),
        ("dropout", "AutogradCPU", _dropout),
    ]
    if onednn and onednn_linear.is_available():
        kernels += [("mm", "CPU", _mm), ("addmm", "CPU", _addmm)]
    # Look up all of torch's kernels before replacing any: later the overrides would be found.
    stock = [operators.get_kernel(f"aten::{name}", key) for name, key, _ in kernels]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for (name, key, kernel), replaced in zip(kernels, stock, strict=True):
            bound = partial(kernel, replaced)
            overrides.impl(name, bound, key, with_keyset=True, allow_override=True)
    return overrides


# The kernels. `stock` is torch's kernel, for inputs that an override does not handle; `keys` is the
# dispatcher's key set.


def _mm(stock: Any, keys: Any, a: Tensor, b: Tensor) -> Tensor:
    if _is_worth_it(a, b):
        return _matmul(a, b, None)
    result: Tensor = stock.call_boxed(keys, a, b)
    return result


def _addmm(
    stock: Any, keys: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    if beta == alpha == 1 and bias.shape == b.shape[1:] and _is_worth_it(a, b):
        return _matmul(a, b, bias)
    total: Tensor = stock.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)
    return total


def _is_worth_it(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not torch.float32:
        return False
    (rows, depth), columns = a.shape, b.shape[1]
    return min(rows, depth, columns) >= MIN_SIDE and rows * depth * columns >= MIN_MULTIPLICATIONS


def _matmul(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    if a.shape[1] != b.shape[0] or b.dtype is not a.dtype:
        raise RuntimeError(f"matrices {tuple(a.shape)} and {tuple(b.shape)} of {b.dtype}")
    # oneDNN's GEMM for any strides.
    result: Tensor = onednn_linear.linear(a, b.t(), bias)
    return result


def _dropout(stock: Any, keys: Any, x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout by torch's formula, x * mask / (1 - p), with another mask.

    Two mask elements are made from each 64-bit random number. Composed of differentiable
    operations, like torch's own.
    """
    is_usual = MIN_PROBABILITY <= p <= 1 - MIN_PROBABILITY
    if not (train and is_usual) or x.dtype is not torch.float32 or x.numel() < MIN_DROPPED:
        dropped: Tensor = stock.call_boxed(keys, x, p, train)
        return dropped
    bits = torch.empty(-(-x.numel() // _LANES), dtype=torch.int64).random_(-(2**63), None)
    drawn = bits.view(torch.int32)[: x.numel()].view(x.shape)
    is_kept = round((1 - p) * _ONE) - _ONE // 2  # numbers below it, from -2^31 on
    mask = torch.lt(drawn, is_kept, out=torch.empty(x.shape))
    return x * mask.div_(1 - p)
