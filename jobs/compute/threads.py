"""How many threads a thread computes with: torch's setting, and its surprises. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def compute_with(threads: int) -> None:
    """Have this thread compute with so many threads, whatever others set.

    It is a setting of each thread. But when one asks or computes for the first time, torch gives it
    the number that any thread has set last, in place of its own: so it asks before.
    """
    torch.get_num_threads()
    torch.set_num_threads(threads)


@contextmanager
def without_helpers() -> Iterator[None]:
    """Compute in this thread alone for a while, for the engines to have all processors ready."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
