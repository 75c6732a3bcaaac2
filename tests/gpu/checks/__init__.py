"""The checks of `tests/gpu/check.py`, one module each, and their shared functions."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import click
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda:0" if HAS_GPU else "cpu"


def fact(name: str, found: Any, expected: str = "", ok: bool | None = None) -> None:
    """Report something that was found; `ok`: whether it is as expected, None: for information."""
    click.echo(json.dumps({"fact": name, "found": found, "expected": expected, "ok": ok}))


def needs_gpu() -> None:
    """End this check here without a GPU."""
    if not HAS_GPU:
        fact("the rest", "skipped: no GPU")
        sys.exit(0)


def like_a_horse() -> None:
    """Set up this process as `own_device` and `zygote` set up a horse."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    if not HAS_GPU:
        torch.set_num_threads(1)


def seconds(work: Callable[[], object], *, repeat: int = 1) -> float:
    """Return the median duration of some work, with what it leaves to do on the GPU."""
    found = []
    for _ in range(repeat):
        synchronize()
        begun = time.perf_counter()
        work()
        synchronize()
        found.append(time.perf_counter() - begun)
    return statistics.median(found)


def synchronize() -> None:
    """Wait until the GPU has finished its queued work."""
    if HAS_GPU:
        torch.cuda.synchronize()
