"""The device of a job: processor name, free memory, bfloat16 support.

Called in the process that computes, never in the zygote. Imports torch.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from ...configs.memory import available_bytes


def processor_name() -> str:
    """Return the processor's name (Linux), or the machine type."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device."""
    if device.type == "cuda":
        # torch's caching allocator reserves memory that tensors can use.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    return available_bytes()


def has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU has bfloat16 arithmetic. For a CPU see `levels`."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
