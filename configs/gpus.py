"""The names of devices, and the NVIDIA GPUs of this machine as their driver reports them.

Needs neither CUDA nor torch.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .values import wrong

AUTO, CPU = "auto", "cpu"  # devices; the others are GPUs

_GPU = re.compile(r"cuda:\d{1,2}|(?:GPU|MIG)-[0-9A-Za-z/-]{1,80}", re.ASCII)
_DRIVER = Path("/proc/driver/nvidia")
_FIELDS = (
    *("index", "uuid", "name", "driver_version", "memory.total", "memory.free"),
    *("persistence_mode", "compute_mode", "mig.mode.current"),
)
_MIB = 2**20
_TIMEOUT_S = 30.0  # a driver without persistence mode takes seconds to start


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU; modes as nvidia-smi spells them, None if the GPU has no such mode."""

    index: int
    uuid: str
    name: str
    driver: str
    total_bytes: int | None  # None: shared with the host
    free_bytes: int | None
    persistence_mode: str | None  # Enabled, Disabled
    compute_mode: str | None  # Default, Exclusive_Process, Prohibited
    mig_mode: str | None  # Enabled, Disabled


def read() -> list[Gpu]:
    """Return the GPUs that nvidia-smi lists, also those hidden by CUDA_VISIBLE_DEVICES.

    Without nvidia-smi there are none. Raises OSError when it fails, for example without a driver.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise OSError(f"nvidia-smi did not end within {_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        problem = (done.stdout.strip() or done.stderr.strip()).partition("\n")[0]
        raise OSError(f"nvidia-smi: {problem or f'exit code {done.returncode}'}")
    return [_gpu(line) for line in done.stdout.splitlines() if line.strip()]


def _gpu(line: str) -> Gpu:
    values = [value.strip() for value in line.split(",")]
    known = [None if value.startswith("[") else value for value in values]  # [N/A]
    index, uuid, name, driver, total, free, persistence, compute, mig = known
    return Gpu(
        index=int(index or 0),
        uuid=uuid or "",
        name=name or "",
        driver=driver or "",
        total_bytes=None if total is None else int(total) * _MIB,
        free_bytes=None if free is None else int(free) * _MIB,
        persistence_mode=persistence,
        compute_mode=compute,
        mig_mode=mig,
    )


def read_device(field: str, value: object) -> str:
    """Read the name of a device. Raises ConfigError."""
    if isinstance(value, str) and (value in (AUTO, CPU) or _GPU.fullmatch(value)):
        return value
    raise wrong(field, "auto, cpu, cuda:N or the UUID of a GPU (GPU-…) or MIG instance", value)


def visible_devices(device: str, visible: str | None) -> str:
    """Return the CUDA_VISIBLE_DEVICES of a process for one device.

    `visible`: that of the parent process, None if it is not set.
    """
    if device == CPU:
        return ""
    names = visible.split(",") if visible is not None else None
    if device == AUTO:
        return "0" if names is None else names[0]
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return device  # a UUID
    if names is None:
        return number
    return names[int(number)] if int(number) < len(names) else ""


def visible(environ: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> int:
    """Return how many GPUs this process may use: CUDA_VISIBLE_DEVICES, else those of the driver."""
    names = environ.get("CUDA_VISIBLE_DEVICES")
    if names is not None:
        return len([name for name in names.split(",") if name.strip() not in ("", "-1")])
    try:
        return len(list((driver / "gpus").iterdir()))
    except OSError:  # no driver
        return 0


def driver_version(driver: Path = _DRIVER) -> str | None:
    """Return the version of the loaded driver, None without one."""
    try:
        words = (driver / "version").read_text().partition("\n")[0].split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and "." in word), None)
