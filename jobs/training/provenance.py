"""The environment that affects the rounding of a training step: versions, threads, device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..compute.device import gpu_summary, processor_name
from ..libraries import versions

_OTHERS = ("threads", "device", "driver", "cuda")


def environment(device: torch.device) -> dict[str, Any]:
    """Return the environment of this process, as plain values."""
    return {
        "versions": dict(versions()),
        "threads": torch.get_num_threads(),
        **(_gpu(device) if device.type == "cuda" else {"device": processor_name()}),
    }


def _gpu(device: torch.device) -> dict[str, Any]:
    summary = gpu_summary(device)
    return {"device": summary["name"], "driver": summary["driver"], "cuda": summary["cuda"]}


def differences(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Describe the differences: 'torch 2.12.0, now 2.13.0'."""
    old, new = (
        {
            **values.get("versions", {}),
            **{name: values.get(name) for name in _OTHERS},
            "processes": values.get("processes", 1),  # earlier versions recorded one
        }
        for values in (then, now)
    )
    return [
        f"{name} {old.get(name)}, now {new[name]}" for name in new if old.get(name) != new[name]
    ]
