"""Runs machine code on PyTorch's own OpenMP threads.

Another thread pool would contend with PyTorch's for the cores, as both spin while they wait. So
kernels run in a parallel region of the OpenMP library that PyTorch has loaded, as compiled C code
would (GOMP_parallel, which LLVM's OpenMP also provides).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch


class OpenMP:
    """Runs functions `void f(int64 *words)` on all threads of a parallel region.

    `barrier`: the address of the function by which a thread waits for the others.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """`library`: an OpenMP runtime. Raises AttributeError if it lacks a function."""
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
        """Run the function at an address, once per thread.

        Its words are the addresses of omp_get_thread_num and omp_get_num_threads, then `words`.
        """
        given = (ctypes.c_int64 * (2 + len(words)))(self._thread, self._threads, *words)
        self._parallel(function, given, threads, 0)


@lru_cache(maxsize=1)
def openmp() -> OpenMP | None:
    """Return PyTorch's OpenMP runtime; None if PyTorch was built without OpenMP."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        return OpenMP(ctypes.CDLL(str(path)))  # loaded already: this returns the same library
    except (OSError, AttributeError):
        return None


def address(numbers: torch.Tensor) -> int:
    """Return the address of a contiguous float32 tensor."""
    assert numbers.is_contiguous()
    assert numbers.dtype == torch.float32
    return numbers.data_ptr()
