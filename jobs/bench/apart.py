"""Runs a measurement without side effects on the next one. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def apart(work: Callable[[], Result]) -> Result:
    """Run `work` in a new thread with the same number of torch threads; return its result.

    The OpenMP workers of that thread end with it; see jobs/engine/compute_thread.py.
    """
    with ThreadPoolExecutor(
        1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
    ) as pool:
        return pool.submit(work).result()
