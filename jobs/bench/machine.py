"""Limits of this machine: float32 GEMM throughput and memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..compute.aten_overrides import fast_kernels

TRIALS = 7  # the best counts: other processes may be running


@dataclass(frozen=True)
class Machine:
    """The two ceilings, with the threads that torch has now."""

    flops: float  # float32 operations per second in a large GEMM
    bytes_s: float  # memory bandwidth, bytes read per second


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
