"""The number of threads that a thread computes with: torch's setting, and its pitfalls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def compute_with(threads: int) -> None:
    """Set this thread's number of compute threads, whatever other threads set.

    The setting is per thread. But at a thread's first read or computation torch initializes it to
    the number that any thread has set last, so it is read before it is set.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)


@contextmanager
def without_helpers() -> Iterator[None]:
    """Compute with one thread in this context, to leave the processors to the engines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
