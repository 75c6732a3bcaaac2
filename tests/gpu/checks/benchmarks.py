"""Speed compared with TRL and transformers on the same device; on a CPU only that it runs."""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

import click
import torch

from warmd.jobs.bench import model as bench_model, rows
from warmd.jobs.bench.rows import Effort
from warmd.jobs.bench.works import INFER
from warmd.jobs.context import WarmModel
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.request import End, Request, Sampling

from . import DEVICE, HAS_GPU, fact, like_a_horse

WORK = "0.5b" if HAS_GPU else "tiny"
TOKENS = 128 if HAS_GPU else 8
PROMPTS = (200, 4096) if HAS_GPU else (20, 40)
TOGETHER = 32 if HAS_GPU else 2


def against_stock() -> None:
    """Report a GRPO step and single-sequence decode compared with TRL and transformers."""
    effort = Effort(pairs=1, device=DEVICE)
    for row in (*rows.grpo([WORK], effort, click.echo), *rows.infer([WORK], effort, click.echo)):
        fact(f"{row.work}: stock, {row.unit}", row.stock)
        fact(f"{row.work}: warmd, {row.unit}", row.warmd, f"floor {row.floor:.3g}")
        fact(f"{row.work}: times faster", row.faster, "> 1")


def of_the_engine() -> None:
    """Report prefill of new prompts, and decoding of one sequence and of many."""
    work = INFER[WORK]
    with tempfile.TemporaryDirectory() as folder:
        bench_model.make(work.shape, Path(folder))
        model = bench_model.read(Path(folder)).to(torch.bfloat16 if HAS_GPU else torch.float32)
        model.generation_config.eos_token_id = None
        tokenizer = bench_model.tokenizer(work.shape)
        tokenizer.eos_token = None
        warm = WarmModel(name="m", path=Path(folder), model=model, tokenizer=tokenizer)
        engine = Engine(warm)
        draw = random.Random(0)

        def serve(length: int, count: int, temperature: float) -> tuple[float, Request]:
            requested = [
                Request(
                    ids=[draw.randrange(10, work.shape.vocab_size) for _ in range(length)],
                    sampling=Sampling(temperature=temperature, seed=number),
                    max_tokens=TOKENS,
                )
                for number in range(count)
            ]
            begun = time.perf_counter()
            for request in requested:
                engine.submit(request)
            for request in requested:
                while not isinstance(request.pieces.get(timeout=120), End):
                    pass
            return time.perf_counter() - begun, requested[0]

        for count, wanted in ((1, "> 600"), (TOGETHER, "> 5000")):
            serve(32, count, 1.0)  # captures its graphs
            seconds, _ = serve(32, count, 1.0)
            expected = f"{wanted} on a GPU"
            fact(f"tokens/s of {count} sampled together", count * TOKENS / seconds, expected)
        for length in PROMPTS:
            serve(length, 1, 0.0)
            _, request = serve(length, 1, 0.0)
            fact(
                f"prefill of {length} new tokens, ms", 1e3 * request.stats.prefill_s, "< 20, < 100"
            )
        engine.close()


if __name__ == "__main__":
    like_a_horse()
    of_the_engine()
    against_stock()
