"""The same GRPO job three times: the same bits with --deterministic, and the cost of it."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts

import tiny
import torch
import transformers
from safetensors.torch import load_file

from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec

from . import DEVICE, HAS_GPU, fact, like_a_horse

DEMO = Path(__file__).parents[3] / "configs" / "demo"


def train(*, deterministic: bool) -> tuple[list[torch.Tensor], float]:
    """Train the demo model; return the trained weights and the seconds."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(DEMO)
    model.to(DEVICE)
    with tempfile.TemporaryDirectory() as folder:
        job = tiny.surroundings(Path(folder, "run"), model)
        cast(tiny.Models, job.ctx.models).tokenizer = transformers.AutoTokenizer.from_pretrained(
            DEMO
        )
        spec = GrpoSpec(
            samples=12 if HAS_GPU else 2,
            num_generations=8,
            learning_rate=1e-3,
            beta=0.05,
            deterministic=deterministic,
        )
        begun = time.perf_counter()
        run(spec, replace(job.ctx, device=DEVICE))
        seconds = time.perf_counter() - begun
        trained = load_file(Path(folder, "run", "model", "model.safetensors"))
    return [trained[name] for name in sorted(trained)], seconds


def check(*, deterministic: bool) -> None:
    """Report whether three runs end with the same bits."""
    runs = [train(deterministic=deterministic) for _ in range(3)]
    is_same = all(
        all(torch.equal(a, b) for a, b in zip(runs[0][0], weights, strict=True))
        for weights, _ in runs[1:]
    )
    untrained = load_file(DEMO / "model.safetensors")
    has_learned = not torch.equal(runs[0][0][0], untrained[min(untrained)])
    fact(
        f"deterministic={deterministic}: the weights have changed", has_learned, "True", has_learned
    )
    # On a GPU without it any result is right.
    ok = is_same if deterministic or not HAS_GPU else None
    name = f"deterministic={deterministic}"
    fact(f"{name}: three runs end with the same bits", is_same, "True", ok)
    fact(f"{name}: seconds of the fastest run", min(seconds for _, seconds in runs))


if __name__ == "__main__":
    like_a_horse()
    check(deterministic=True)
    check(deterministic=False)
