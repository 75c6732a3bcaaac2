"""What the device of a job has: memory, and arithmetic in bfloat16.

It is asked in the process that computes there, never in the zygote. Imports torch.
"""

from __future__ import annotations

import torch

from ..configs.memory import available_bytes


def free_bytes(device: torch.device) -> int:
    """The memory that is free on a device."""
    if device.type == "cuda":
        # What torch holds back is free for tensors, too.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + held
    return available_bytes()


def has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU computes in bfloat16 by itself. A CPU's units are tried (products.py)."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
