"""Versions, driver, modes, and the imports of every job kind."""

from __future__ import annotations

from importlib.metadata import version

import torch

from warmd.cli.commands.doctor import check_gpus
from warmd.jobs import KINDS, import_all
from warmd.jobs.compute.device import gpu_summary, has_bfloat16

from . import DEVICE, fact, needs_gpu

if __name__ == "__main__":
    for name in ("warmd", "torch", "transformers", "trl", "accelerate", "numba"):
        fact(f"version of {name}", version(name))
    fact("CUDA of this torch", torch.version.cuda)
    for kind in KINDS:
        import_all(kind)
    fact("imports of all kinds", True, "True", True)
    for check in check_gpus():
        fact(f"doctor: {check.found}", check.result, f"ok {check.advice}", check.result == "ok")
    needs_gpu()
    fact("device", gpu_summary(torch.device(DEVICE)))
    has_bf16 = has_bfloat16(torch.device(DEVICE))
    fact("bfloat16", has_bf16, "True on Ampere and later")
    fact("cuDNN", torch.backends.cudnn.version())
