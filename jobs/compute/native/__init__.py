"""Machine code for a CPU (numba, LLVM): linear layers and a fused decode step.

A single-sequence decode step is bound by memory bandwidth: the weights are read once. PyTorch adds
a hundred operations per layer, microseconds each. Here a step is one call: every thread reads its
share of the weights as one stream, and only the arithmetic lies between two GEMVs.

- `intrinsics`: what numba lacks, and the instruction sets it compiles for; `gemm`: inner loops.
- `rowwise`: RMSNorm, RoPE, SwiGLU and attention of one row; `row_entries`: entry points for many
  rows, which the decoder's prefill uses, so that both compute the same bits.
- `linear`: linear layers; `packing`: packs weights; `panels`: both for tensors.
- `decode_step`: one token of several sequences through all layers; `layout`: the memory layout of
  its arguments; `fused`: fills them in.
- `openmp`: runs kernels on PyTorch's threads; `work_stealing`: distributes tasks among them.
- `compiling`: compiles with numba and caches the machine code.
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
