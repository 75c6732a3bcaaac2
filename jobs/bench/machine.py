"""What this machine can do: its rate of float32 products, and how fast its memory is read."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..compute.aten_overrides import fast_kernels

TRIALS = 7  # of which the best counts: others may be using the machine


@dataclass(frozen=True)
class Machine:
    """The two ceilings, with the threads that torch has now."""

    flops: float  # float32 operations a second in a large matrix product
    bytes_s: float  # bytes a second read from memory


def measure() -> Machine:
    """Measure both; takes about a second."""
    rows, inputs, outputs = 1024, 1024, 4096
    x, weight = torch.randn(rows, inputs), torch.randn(outputs, inputs)
    with fast_kernels(onednn=True):
        ours = _best(lambda: x @ weight.t())
    seconds = min(ours, _best(lambda: x @ weight.t()))
    large = torch.ones(2**27)  # 0.5 GB: more than a cache holds
    return Machine(
        flops=2 * rows * inputs * outputs / seconds,
        bytes_s=4 * large.numel() / _best(large.sum),
    )


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIALS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)
