"""The number of threads that a thread computes with: torch's setting, and its pitfalls."""

from __future__ import annotations

import os
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


def renew_pool_after_forks() -> None:
    """Renew torch's thread pool in every process forked from here, before it starts a thread.

    torch drops the parent's pool at the first use in a child. If two threads are first at once, one
    finds no pool and fails: `pool INTERNAL ASSERT FAILED … Invalid thread pool!` (ATen,
    ParallelOpenMP.cpp and caffe2's pthreadpool-cpp.cc).
    """
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))


@contextmanager
def without_helpers() -> Iterator[None]:
    """Compute with one thread in this context, to leave the processors to the engines."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
