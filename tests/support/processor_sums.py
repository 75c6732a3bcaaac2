"""Whether this machine adds numbers in the order of another one: bits are comparable then.

Kernels of torch, MKL and oneDNN are chosen by the processor, and each adds in an order of its own.
`CAPS` limits all of them to what every x86-64 processor of the last ten years has; `digest` is of a
training that runs with these limits. Run as a program it prints both digest and versions.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

_HASWELL = (
    "64bit avx avx2 bmi bmi2 cmov cx16 f16c fma fxsr lzcnt mmx movbe popcnt sse sse2 sse3 sse4.1 "
    "sse4.2 ssse3 xsave"
)
CAPS = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",  # it does not take AVX2 on processors that are not Intel's
    "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in _HASWELL.split()),
    "NUMBA_CPU_NAME": "haswell",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
}
LIBRARIES = ("accelerate", "numba", "numpy", "peft", "tokenizers", "torch", "transformers", "trl")


def here() -> dict[str, Any]:
    """Return `sums`, a digest, and `versions` of the libraries, of this environment with CAPS."""
    environ = {**os.environ, **CAPS, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, __file__], env=environ, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def digest() -> str:
    """Train a Llama of a layer for some steps, by MKL and by oneDNN; return a digest of all."""
    import hashlib

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            values = torch.arange(weight.numel(), dtype=torch.float64) * (0.7 + number)
            weight.copy_((values.sin() / 4).view_as(weight))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = (torch.arange(6 * 50) * 37 % 100).view(6, 50)
    found = hashlib.sha256()
    for _ in range(4):
        loss = model(ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.update(loss.detach().numpy().tobytes())
    x = model.lm_head.weight.detach()
    packed = torch.ops.mkldnn._linear_pointwise(x, x.repeat(3, 1), None, "none", [], "")
    for values in (*model.parameters(), packed, x.log_softmax(-1), torch.erf(x), torch.tanh(x)):
        found.update(values.detach().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    versions = {name: version(name) for name in LIBRARIES}
    sys.stdout.write(json.dumps({"sums": digest(), "versions": versions}) + "\n")
