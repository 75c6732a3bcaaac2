"""Measures torch's GEMM (MKL) against oneDNN's on the GEMMs of float32 training.

By the CPU time of one thread, alternating, so that other processes and the number of threads have
little influence. Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from . import onednn
from .threads import without_helpers

_ROWS, _INPUTS, _OUTPUTS = 192, 384, 768  # of the layer that is tried
_TRIALS = 3


@torch.no_grad()
def measure_gemm() -> float:
    """Return the speed of oneDNN's GEMM relative to torch's (MKL), for training.

    Measured on a linear layer's forward GEMM and the two of its backward pass, with other strides.
    Takes about 40 ms in one thread. Needs `onednn.is_available`.
    """
    # No random numbers: a job's generator must not advance.
    x, weight, gradient = (
        torch.linspace(-1, 1, rows * columns).view(rows, columns)
        for rows, columns in ((_ROWS, _INPUTS), (_OUTPUTS, _INPUTS), (_ROWS, _OUTPUTS))
    )
    forms = ((x, weight.t()), (gradient, weight), (gradient.t(), x))
    with without_helpers():
        pairs = [_seconds(a, b) for a, b in forms]
    return sum(stock for stock, _ in pairs) / sum(other for _, other in pairs)


def _seconds(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Return the CPU seconds of a @ b by torch's GEMM and by oneDNN's, the best of some trials."""
    y = torch.empty(len(a), b.shape[1])

    def stock() -> None:
        torch.mm(a, b, out=y)  # with `out`, because `fast_kernels` may have overridden mm itself

    def other() -> None:
        onednn.linear(a, b.t(), None)

    trials = [(_thread_seconds(stock), _thread_seconds(other)) for _ in range(_TRIALS + 1)]
    fastest, fastest_onednn = map(min, zip(*trials[1:], strict=True))  # the first one warms up
    return fastest, fastest_onednn


def _thread_seconds(work: Callable[[], None]) -> float:
    begun = time.thread_time()
    work()
    return time.thread_time() - begun
