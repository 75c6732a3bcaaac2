"""Makes a CPU build of torch look like one of CUDA with GPUs; imported in child processes only.

FAKE_GPUS: the number of GPUs that NVML sees, -1 if it does not know. `TOUCHED` has the name of
every call that would have initialized CUDA; each raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import torch

TOUCHED: list[str] = []
NUM_GPUS = int(os.environ.get("FAKE_GPUS", "1"))


def _touching(name: str) -> Callable[..., NoReturn]:
    def touch(*_: Any, **__: Any) -> NoReturn:
        TOUCHED.append(name)
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    return touch


def _nvml_count() -> int:
    return 0 if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else NUM_GPUS


torch.cuda._is_compiled = lambda: True
torch.cuda._device_count_nvml = _nvml_count
cuda: Any = torch.cuda
cuda._cudart = object()
torch.version.cuda = "13.0"
cuda._is_in_bad_fork = lambda: False
for _name in ("_cuda_getDeviceCount", "_cuda_init"):
    setattr(torch._C, _name, _touching(_name))
for _name in ("_cuda_getCurrentRawStream", "_CudaStreamBase", "_CudaEventBase"):  # imported
    setattr(torch._C, _name, object)
