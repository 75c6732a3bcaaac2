"""Limits of the measured device: GEMM throughput and memory bandwidth.

    python -m warmd.jobs.bench.machine limits
    python -m warmd.jobs.bench.machine device

prints them, or only the type of the device, as one JSON object. The device is the GPU that this
process sees, else the CPU.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import orjson
import torch

from ..compute.aten_overrides import fast_kernels
from ..compute.device import has_bfloat16

TRIALS = 7  # of which the fastest counts, as other processes may run


@dataclass(frozen=True)
class Machine:
    """The two limits of the device; of a CPU with torch's current number of threads."""

    flops: float  # operations per second of a large GEMM: float32, or bfloat16 on a GPU that has it
    bytes_s: float  # memory bandwidth: bytes read per second


def device() -> torch.device:
    """Return the device that this process measures; cuDNN's attention is off, as in a horse."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    """Wait until the device has finished its queued work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure() -> Machine:
    """Measure both; takes about a second."""
    there = device()
    dtype = torch.bfloat16 if has_bfloat16(there) else torch.float32
    rows, inputs, outputs = (1024, 1024, 4096) if there.type == "cpu" else (8192, 8192, 8192)
    x = torch.randn(rows, inputs, device=there, dtype=dtype)
    weight = torch.randn(outputs, inputs, device=there, dtype=dtype)
    seconds = _best(lambda: x @ weight.t())
    if there.type == "cpu":
        with fast_kernels(onednn=True):
            seconds = min(seconds, _best(lambda: x @ weight.t()))
    large = torch.ones(2**27, device=there)  # 0.5 GB: more than a cache holds
    return Machine(
        flops=2 * rows * inputs * outputs / seconds,
        bytes_s=4 * large.numel() / _best(large.sum),
    )


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIALS):
        synchronize()
        started = time.perf_counter()
        work()
        synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


if __name__ == "__main__":
    limits = asdict(measure()) if sys.argv[1] == "limits" else {}
    measured = {**limits, "device": device().type}
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
