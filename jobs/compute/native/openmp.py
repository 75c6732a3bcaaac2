"""Runs machine code on PyTorch's own OpenMP threads.

Another thread pool would contend with PyTorch's for the cores, as both spin while they wait. So
kernels run in a parallel region of the OpenMP library that PyTorch has loaded, as compiled C code
would (GOMP_parallel, which LLVM's OpenMP has, too).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch


class OpenMP:
    """Runs functions `void f(int64 *words)`.

    `barrier` is the address of a function by which a thread waits for the others.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """`library`: one that has OpenMP's functions. Raises AttributeError."""
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None
        self._thread, self._threads, self.barrier = (
            ctypes.cast(function, ctypes.c_void_p).value or 0
            for function in (
                library.omp_get_thread_num,
                library.omp_get_num_threads,
                library.GOMP_barrier,
            )
        )

    def run(self, function: int, words: Sequence[int], *, threads: int) -> None:
        """Run the function at an address.

        It is given the addresses of the functions that tell its thread and their number, then
        `words`.
        """
        given = (ctypes.c_int64 * (2 + len(words)))(self._thread, self._threads, *words)
        self._parallel(function, given, threads, 0)


@lru_cache(maxsize=1)
def openmp() -> OpenMP | None:
    """Return PyTorch's threads; None where they are not OpenMP's."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return OpenMP(ctypes.CDLL(str(path)))  # loaded long since: this finds what it found
    except (OSError, AttributeError):
        return None


def address(numbers: torch.Tensor) -> int:
    """Where float32 numbers are that lie one behind the other, as machine code takes them to."""
    assert numbers.is_contiguous()
    assert numbers.dtype == torch.float32
    return numbers.data_ptr()
