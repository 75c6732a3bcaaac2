"""Machine code of our own for a CPU: linear layers, and a decode step of a Llama-like decoder.

A single-sequence decode step is bound by memory bandwidth: it takes as long as all weights take to
be read. PyTorch adds a hundred operations a layer to that, each of which costs microseconds. Here a
step is one call: every thread reads its share of the weights in one stream, and between two matrix
multiplications is nothing but the arithmetic.

- `intrinsics`: what numba lacks, and which instructions it compiles for; `gemm`: inner loops.
- `rowwise`: what a decoder does to a row between linear layers; `row_entries`: the same for many
  rows. The decoder's pass for prompts uses them, too, so that both compute the same bits.
- `linear`: linear layers; `packing`: puts weights into their order; `panels`: both for tensors.
- `decode_step`: one token of several sequences through all layers; `layout`: what it is told of a
  model; `fused`: tells it.
- `openmp`: runs it on PyTorch's own threads; `work_stealing`: what each of them does.
- `compiling`: when it is compiled, and where that is kept.
"""

from __future__ import annotations

import logging
from functools import lru_cache

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def is_available() -> bool:
    """Whether this code can run here: numba can be imported and PyTorch's threads are OpenMP's."""
    try:
        from . import panels  # noqa: F401  imports numba
        from .openmp import openmp
    except ImportError as error:
        log.warning("no native kernels, which is slower: %s", error)
        return False
    return openmp() is not None
