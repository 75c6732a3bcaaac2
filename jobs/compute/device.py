"""What the device of a job is and has: its name, its memory, and arithmetic in bfloat16.

It is asked in the process that computes there, never in the zygote. Imports torch.
"""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from ...configs.memory import available_bytes


def processor_name() -> str:
    """The processor's name, as Linux gives it; elsewhere the kind of machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def free_bytes(device: torch.device) -> int:
    """The memory that is free on a device."""
    if device.type == "cuda":
        # What torch holds back is free for tensors, too.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    return available_bytes()


def has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU computes in bfloat16 by itself. A CPU's units are tried (quantized.py)."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
