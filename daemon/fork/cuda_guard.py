"""Guard of the zygote: nothing may initialize CUDA there.

CUDA does not survive a fork: one call in the zygote, and every later job fails with "Cannot
re-initialize CUDA in forked subprocess". So the calls of torch that initialize it raise, with the
name of the caller, until the horse allows them again.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

_TIMEOUT_S = 30.0  # a driver without persistence mode takes seconds to start

# Counts the GPUs that CUDA can use, without torch: a process is started for it.
_COUNT = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
print(count.value)
"""

_replaced: dict[str, Callable[..., Any]] = {}  # functions of torch._C, by name


def forbid_cuda() -> None:
    """Make every initialization of CUDA raise RuntimeError, until `allow_cuda`.

    GPUs are counted by NVML, or by a process where NVML cannot tell: a MIG instance, a container
    without the utility libraries.
    """
    import torch

    # It initializes CUDA when it is imported (peft imports it if it is there). No kind needs it.
    sys.modules.setdefault("bitsandbytes", None)  # type: ignore[arg-type]
    if not torch.cuda._is_compiled() or _replaced:
        return
    for name, function in (("_cuda_getDeviceCount", _count_gpus), ("_cuda_init", _refuse)):
        _replaced[name] = getattr(torch._C, name)
        setattr(torch._C, name, function)


def allow_cuda() -> None:
    """Allow this process, a fork of the zygote, to use CUDA. Raises RuntimeError if it cannot."""
    import torch

    if sys.modules.get("bitsandbytes", torch) is None:
        del sys.modules["bitsandbytes"]
    for name, function in _replaced.items():
        setattr(torch._C, name, function)
    _replaced.clear()
    if torch.cuda._is_compiled() and torch.cuda._is_in_bad_fork():
        raise RuntimeError("the zygote has initialized CUDA: restart the daemon")


def _refuse() -> NoReturn:
    raise RuntimeError(f"{_caller()} initializes CUDA in the zygote, which no job would survive")


def _caller() -> str:
    """Return file and line of the call that led into torch."""
    torch_folder = str(Path(sysconfig.get_path("purelib"), "torch"))
    frames = reversed(traceback.extract_stack())
    outside = (f for f in frames if f.filename != __file__ and torch_folder not in f.filename)
    frame = next(outside, None)
    return "torch" if frame is None else f"{frame.filename}:{frame.lineno}"


@cache
def _count_gpus() -> int:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COUNT], capture_output=True, timeout=_TIMEOUT_S, check=True
        )
        return int(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return 0  # no driver
