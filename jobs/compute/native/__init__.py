"""Machine code for a CPU (numba, LLVM): linear layers and a fused decode step.

A single-sequence decode step is bound by memory bandwidth: it reads every weight once. PyTorch
adds about a hundred operations per layer, each of some microseconds. Here a step is one call: every
thread reads its share of the weights as one stream, with nothing but arithmetic between two GEMVs.

- `intrinsics`: vector instructions that numba lacks, instruction sets; `gemm`: microkernels
- `rowwise`: RMSNorm, RoPE, SwiGLU and attention of one row; `row_entries`: the same for many rows,
  for prefill, with the same bits
- `linear`: linear layers; `arranging`: puts their weights into the order in which they read them;
  `panels`: the interface for tensors
- `low_rank`: low-rank updates of linear layers, for LoRA adapters
- `decode_step`: one token of several sequences through all layers; `layout`: the memory layout of
  its arguments (`compute.fused` builds them and calls it)
- `openmp`: runs kernels on PyTorch's threads; `work_stealing`: distributes tasks among the threads
- `compiling`: compiles with numba and caches the machine code
"""

from __future__ import annotations

import logging
from functools import lru_cache

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether the kernels can run: numba is importable, and PyTorch uses OpenMP."""
    try:
        from . import panels  # noqa: F401  imports numba
        from .openmp import openmp
    except ImportError as error:
        log.warning("no native kernels, which is slower: %s", error)
        return False
    return openmp() is not None
