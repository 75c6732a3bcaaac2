"""Quantizes a GGUF file by llama.cpp's own quantizer, from the package `llama-cpp-python`.

    python tests/benchmarks/peer_quantize.py F32.gguf Q4_K_M TARGET

`peers.py` and `quality.py` run it in the environment of llama.cpp.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp as llama  # type: ignore[import-not-found, unused-ignore]
from peer_child import THREADS


def quantize(source: Path, kind: str, target: Path) -> None:
    """Write `target` with the weights of `source` in llama.cpp's format `kind`."""
    llama.llama_backend_init()
    params = llama.llama_model_quantize_default_params()
    params.ftype = getattr(llama, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.nthread = THREADS
    partial = target.with_suffix(".part")
    made = ctypes.byref(params)
    if llama.llama_model_quantize(str(source).encode(), str(partial).encode(), made):
        raise RuntimeError(f"{source} cannot be quantized to {kind}")
    partial.rename(target)


if __name__ == "__main__":
    quantize(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
