"""The device of a horse: the one that its worker is configured for, or an automatic choice.

A horse sees only one GPU: a Trainer would split every batch among all visible GPUs.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ...configs.gpus import AUTO, CPU, visible_devices
from .cuda_guard import allow_cuda


@dataclass(frozen=True)
class OwnDevice:
    """The device of this process; `problem`: why it is not the requested GPU."""

    name: str  # a torch device: "cpu", "cuda:0"
    problem: str | None = None


def own_device(wanted: str, memory_share: float = 1.0) -> OwnDevice:
    """Choose this process's device, before anything else in it uses a GPU. Raises nothing.

    `wanted`: as `WorkerConfig.device`; `auto`: the first visible GPU, or the CPU without one.
    `memory_share`: of the GPU's memory, at most for this process.
    """
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = visible_devices(wanted, visible)
    try:
        allow_cuda()
        if torch.cuda.is_available():
            _start_cuda(memory_share)
            return OwnDevice("cuda:0")
        problem = None if wanted in (AUTO, CPU) else "CUDA finds no such GPU"
    except Exception as error:  # by the driver: too old, the GPU in exclusive use, out of memory
        problem = str(error).partition("\n")[0]
    _hide_gpus()
    return OwnDevice("cpu", problem)


def _start_cuda(memory_share: float) -> None:
    import torch

    # cuDNN's attention, torch's first choice on Hopper, gives NaN gradients with some masks
    # (pytorch#196678), compiles a plan for every new shape (20 to 40 ms) and is not deterministic.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.ones(1, device="cuda:0")
    torch.cuda.set_per_process_memory_fraction(memory_share, 0)


def start_libraries(own: OwnDevice) -> None:
    """Create the cuBLAS handle and workspace that the first GEMM on the GPU would create."""
    import torch

    if own.name != CPU:
        ones = torch.ones(8, 8, device=own.name)
        torch.mm(ones, ones)


def _hide_gpus() -> None:
    """Make torch and transformers compute on the CPU, although the machine may have a GPU."""
    from transformers.utils.import_utils import is_torch_cuda_available

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    is_torch_cuda_available.cache_clear()
