"""A measurement that leaves nothing behind that slows the next one. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")


def apart(work: Callable[[], Result]) -> Result:
    """Do `work` in a thread of its own, with as many threads as here, and return what it returns.

    The helpers that OpenMP gives that thread end with it; see jobs/engine/compute_thread.py.
    """
    with ThreadPoolExecutor(
        1, initializer=torch.set_num_threads, initargs=(torch.get_num_threads(),)
    ) as pool:
        return pool.submit(work).result()
