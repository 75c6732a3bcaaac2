"""Deterministic kernels on a GPU for loss, gradients and update; random numbers by key; settings.

On a CPU the same state always gives the same bits. On a GPU the backward pass of attention and the
gradient of embeddings add in an order that varies from run to run, unless torch is set to use
deterministic algorithms. Generation is excluded: it samples with a cumulative sum, for which torch
has no deterministic algorithm and raises. Imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch

settings = cast(Any, torch.utils).deterministic  # its attributes are not declared


@contextmanager
def algorithms(*, deterministic: bool) -> Iterator[None]:
    """Within this block use deterministic algorithms of torch, or any if not `deterministic`."""
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(deterministic)
    settings.fill_uninitialized_memory = False  # not read; filling costs bandwidth
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


@contextmanager
def random_numbers(numbers: Sequence[int]) -> Iterator[None]:
    """Within this block, draw from a CPU generator seeded with these numbers."""
    seed = int(np.random.SeedSequence(list(numbers)).generate_state(1, np.uint64)[0])
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


@contextmanager
def kept_settings() -> Iterator[None]:
    """After this block, which runs user code, threads and default dtype of torch are as before.

    They are the process's: a reward that sets them would change what the training computes.
    """
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_default_dtype(dtype)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
