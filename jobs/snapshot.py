"""What a checkpoint of a training holds, and what it was made with.

The files are those of the Trainer of transformers, so that `from_pretrained` opens one and a plain
Trainer can resume from it, and one of our own. Imports torch: only `run` of a kind imports it.
"""

from __future__ import annotations

import os
import platform
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from transformers.trainer import (
    OPTIMIZER_NAME,
    SCHEDULER_NAME,
    TRAINER_STATE_NAME,
)

from .context import MANIFEST
from .errors import JobFailed

JOB_STATE = "job_state.pt"  # what the Trainer's own files leave out
RNG_STATE = "rng_state.pth"
STATE_FILES = (OPTIMIZER_NAME, SCHEDULER_NAME, RNG_STATE, JOB_STATE, TRAINER_STATE_NAME)
_LIBRARIES = ("warmd", "torch", "transformers", "trl", "accelerate", "numpy")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """All that the next step depends on, as it is now.

    Tensors on the CPU are the training's own: who writes them must be a copy of this process, or
    the training must wait. Those of a GPU were copied when the snapshot was taken.
    """

    write_model: Callable[[Path, dict[str, Any] | None], None]
    weights: dict[str, Any] | None  # None: the model's own
    optimizer: dict[str, Any]
    scheduler: dict[str, Any]
    rng: dict[str, Any]
    job: dict[str, Any]
    trainer: Any  # transformers.TrainerState

    def write(self, folder: Path) -> None:
        """Write every file of the checkpoint. For a forked child: it stays on one thread."""
        torch.set_num_threads(1)  # the threads of OpenMP are not here
        torch.serialization.set_crc32_options(False)  # the manifest has a checksum of the file
        self.write_model(folder, self.weights)
        torch.save(self.optimizer, folder / OPTIMIZER_NAME)
        torch.save(self.scheduler, folder / SCHEDULER_NAME)
        torch.save(self.rng, folder / RNG_STATE)
        torch.save(self.job, folder / JOB_STATE)
        self.trainer.save_to_json(str(folder / TRAINER_STATE_NAME))


def rng_state() -> dict[str, Any]:
    """Return the state of every global generator, as the Trainer of transformers reads it."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "cpu": torch.random.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.random.get_rng_state()
    return state


def on_cpu(state: Any) -> Any:
    """Return the state with its tensors on the CPU: those of a GPU copied, the others as is."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf, state)


def require_files(checkpoint: Path) -> None:
    """Raise JobFailed when a file of the state is missing: a Trainer would begin it afresh."""
    for name in STATE_FILES:
        if not (checkpoint / name).is_file():
            raise JobFailed(f"{checkpoint.name}: {name} is missing, and nothing can stand for it")


def read_job_state(checkpoint: Path) -> dict[str, Any]:
    """Return what `Snapshot.job` was."""
    state: dict[str, Any] = torch.load(
        checkpoint / JOB_STATE, map_location="cpu", weights_only=True
    )
    return state


def link_model(checkpoint: Path, folder: Path) -> bool:
    """Give `folder` the files of the model in `checkpoint`, without a copy; False if it cannot."""
    try:
        for file in checkpoint.iterdir():
            if file.name not in (*STATE_FILES, MANIFEST):
                os.link(file, folder / file.name)
    except OSError:  # a file system without links
        for file in folder.iterdir():
            file.unlink()
        return False
    return True


def surroundings(device: torch.device) -> dict[str, Any]:
    """Return what the rounding of a step depends on, beside the state: plain values, by name."""
    return {
        "versions": {name: version(name) for name in _LIBRARIES},
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
    }


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what of the surroundings is not what it was: 'torch 2.12.0, now 2.13.0'."""
    old, new = (
        {**values.get("versions", {}), **{k: values.get(k) for k in ("threads", "device")}}
        for values in (then, now)
    )
    return [
        f"{name} {old.get(name)}, now {new[name]}" for name in new if old.get(name) != new[name]
    ]


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
