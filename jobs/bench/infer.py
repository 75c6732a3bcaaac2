"""The decoding of one request: transformers' generate, the engine, and what reading memory permits.

    python -m warmd.jobs.bench.infer WORK FOLDER PAIRS

FOLDER holds the model (`model.py`). The sides take turns in one process; prompts are random words.
Prints one JSON object: tokens per second. Imports torch and transformers.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import orjson
import torch

from ..context import WarmModel
from ..engine.engine import Engine
from ..engine.generation import End, Generation, Sampling
from . import machine, model
from .works import INFER, InferWork

WARM_UP_TOKENS = 40  # until the engine has all layers in the form that it keeps
PRECISIONS = ("own", "int8")


def measure(work: InferWork, folder: Path, pairs: int) -> dict[str, Any]:
    """Return `stock`, `own` and `int8`: tokens per second, one number for each round; the floors.

    A floor is the bandwidth of memory by the bytes of all weights, which every token reads: of
    float32 for `own_floor`, of one byte each for `int8_floor`.
    """
    rates = machine.measure()
    causal_lm = model.read(folder)
    causal_lm.generation_config.eos_token_id = None  # every answer has all its tokens
    tokenizer = model.tokenizer(work.shape)
    tokenizer.eos_token = None
    warm = WarmModel(name="bench", path=folder, model=causal_lm, tokenizer=tokenizer)
    words = random.Random(0)

    def prompt() -> list[int]:
        return [words.randrange(10, work.shape.vocab_size) for _ in range(work.prompt)]

    engines = {precision: Engine(warm, precision=precision) for precision in PRECISIONS}
    for engine in engines.values():
        _ask(engine, prompt(), max(WARM_UP_TOKENS, work.completion))
    found: dict[str, Any] = {name: [] for name in ("stock", *PRECISIONS)}
    for _ in range(pairs):
        found["stock"].append(work.completion / _generate(causal_lm, prompt(), work.completion))
        for precision, engine in engines.items():
            seconds = _ask(engine, prompt(), work.completion)
            found[precision].append(work.completion / seconds)
    for engine in engines.values():
        engine.close()
    weights = causal_lm.num_parameters()
    found |= {"own_floor": rates.bytes_s / (4 * weights), "int8_floor": rates.bytes_s / weights}
    return {**found, "bytes_s": rates.bytes_s}


def _ask(engine: Engine, ids: list[int], tokens: int) -> float:
    begun = time.perf_counter()
    generation = Generation(ids=ids, sampling=Sampling(temperature=0), max_tokens=tokens)
    engine.submit(generation)
    while not isinstance(piece := generation.pieces.get(), End):
        pass
    if piece.error is not None:
        raise piece.error
    return time.perf_counter() - begun


def _generate(causal_lm: Any, prompt: list[int], tokens: int) -> float:
    begun = time.perf_counter()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        causal_lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
        )
    return time.perf_counter() - begun


if __name__ == "__main__":
    name, folder, pairs = sys.argv[1:]
    measured = measure(INFER[name], Path(folder), int(pairs))
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
