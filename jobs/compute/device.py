"""The device of a job: processor name, free memory, bfloat16 support, fatal errors.

Called in the process that computes, never in the zygote. Imports torch.
"""

from __future__ import annotations

import logging
import os
import platform
from pathlib import Path
from typing import Any

import torch

from ...configs.gpus import driver_version
from ...configs.memory import available_bytes
from ..errors import LOST_CONTEXT_EXIT

log = logging.getLogger(__name__)


def processor_name() -> str:
    """Return the processor's name (Linux), or the machine type."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def gpu_summary(device: torch.device) -> dict[str, Any]:
    """Return the field `gpu` of a `begin` event: the versions and sizes that results depend on."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,  # of a MIG instance with its profile
        "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
    }


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, of a GPU within the share of this process."""
    if device.type == "cuda":
        if device == torch.device("cuda"):  # no index: the memory fraction's getter raises
            device = torch.device("cuda", torch.cuda.current_device())
        free, total = torch.cuda.mem_get_info(device)
        used = torch.cuda.memory_allocated(device)
        # torch's caching allocator reserves memory that tensors can use.
        held = torch.cuda.memory_reserved(device) - used
        share = torch.cuda.get_per_process_memory_fraction(device)
        return min(free + held, int(share * total) - used)
    return available_bytes()


def has_bfloat16(device: torch.device) -> bool:
    """Whether a GPU has bfloat16 arithmetic. For a CPU see `levels`."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def exit_if_context_lost(error: BaseException) -> None:
    """End this process if an error has destroyed its CUDA context.

    After a device-side assert or an illegal address every later call fails too, also those of other
    jobs. The worker queues them again, in a new process. Running out of memory is not such an
    error.
    """
    if isinstance(error, torch.AcceleratorError):
        log.critical("the CUDA context is lost, ending the process: %s", error)
        logging.shutdown()
        os._exit(LOST_CONTEXT_EXIT)
