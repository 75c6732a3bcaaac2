"""Times the steps of one trainer; measures its memory and the limit of the hardware.

Imports torch and transformers.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from transformers import TrainerCallback

from ..compute.allocator import keep_freed_memory
from ..compute.aten_overrides import fast_kernels
from . import machine
from .memory import Peak


def timed(
    side: str, make: Callable[[str], Any], floor_s: Callable[[int, machine.Machine], float]
) -> dict[str, Any]:
    """Train; return the seconds of each step except the first, which allocates AdamW's memory.

    `side`: trl or warmd, which trains with warmd's kernels. `make`: output folder -> trainer.
    `floor_s`: (parameters, rates of this machine) -> minimum seconds of a step.
    """
    device = machine.device().type
    rates = machine.measure()
    if side == "warmd":
        keep_freed_memory()
    clock = _Clock()
    with (
        tempfile.TemporaryDirectory() as output,
        Peak() as peak,
        fast_kernels() if side == "warmd" else nullcontext(),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", ".is_gradient_checkpointing", FutureWarning)
        trainer = make(output)
        trainer.add_callback(clock)
        trainer.train()
    return {
        "seconds": clock.seconds[1:],
        "processor_s": clock.processor_s[1:],
        "device": device,
        "private_bytes": _device_bytes() if device == "cuda" else peak.private_bytes,
        "resident_bytes": peak.resident_bytes,
        "floor_s": floor_s(trainer.model.num_parameters(), rates),
        "flops": rates.flops,
        "bytes_s": rates.bytes_s,
    }


def _device_bytes() -> int:
    return torch.cuda.max_memory_reserved()


class _Clock(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Records the duration of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.processor_s: list[float] = []
        self._began = 0.0, 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        machine.synchronize()
        self._began = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        machine.synchronize()
        self.seconds.append(time.perf_counter() - self._began[0])
        self.processor_s.append(time.process_time() - self._began[1])
