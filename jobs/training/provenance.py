"""What the rounding of a training step depends on beside its state: versions, threads, device."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import torch

from ..compute.device import processor_name

_LIBRARIES = ("warmd", "torch", "transformers", "trl", "accelerate", "numpy")


def environment(device: torch.device) -> dict[str, Any]:
    """Return the environment of this process, as plain values."""
    return {
        "versions": {name: version(name) for name in _LIBRARIES},
        "threads": torch.get_num_threads(),
        "device": _name(device),
    }


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say what is not as it was: 'torch 2.12.0, now 2.13.0'."""
    old, new = (
        {**values.get("versions", {}), **{k: values.get(k) for k in ("threads", "device")}}
        for values in (then, now)
    )
    return [
        f"{name} {old.get(name)}, now {new[name]}" for name in new if old.get(name) != new[name]
    ]
