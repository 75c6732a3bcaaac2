"""The decoding of one request: transformers' generate, the engine, and what reading memory permits.

    python -m warmd.jobs.bench.infer WORK FOLDER PAIRS

FOLDER holds the model (`model.py`). The sides take turns in one process; prompts are random words.
Prints one JSON object: tokens per second. Imports torch and transformers.
"""

from __future__ import annotations

import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import torch

from ..context import WarmModel
from ..engine.engine import Engine
from ..engine.generation import End, Generation, Sampling
from . import machine, model
from .apart import apart
from .works import INFER, InferWork

WARM_UP_TOKENS = 40  # until the engine has all layers in the form that it keeps
PRECISIONS = ("own", "int8")


def measure(work: InferWork, folder: Path, pairs: int) -> dict[str, Any]:
    """Return `stock`, `own` and `int8`: tokens per second, one number for each round; the floors.

    Counted from the first token on: what reading the prompt takes is left out.

    A floor is the bandwidth of memory by the bytes of all weights, which every token reads: of
    float32 for `own_floor`, of one byte each for `int8_floor`.
    """
    rates = apart(machine.measure)
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
        found["stock"].append(apart(partial(_generate, causal_lm, prompt(), work.completion)))
        for precision, engine in engines.items():
            found[precision].append(_ask(engine, prompt(), work.completion))
    for engine in engines.values():
        engine.close()
    weights = causal_lm.num_parameters()
    found |= {"own_floor": rates.bytes_s / (4 * weights), "int8_floor": rates.bytes_s / weights}
    return {**found, "bytes_s": rates.bytes_s}


def _ask(engine: Engine, ids: list[int], tokens: int) -> float:
    generation = Generation(ids=ids, sampling=Sampling(temperature=0), max_tokens=tokens)
    engine.submit(generation)
    while not isinstance(piece := generation.pieces.get(), End):
        pass
    if piece.error is not None:
        raise piece.error
    return (tokens - 1) / generation.measures.decode_s


def _generate(causal_lm: Any, prompt: list[int], tokens: int) -> float:
    """The same of transformers: what all tokens take without what the first one takes."""
    ids = torch.tensor([prompt])

    def seconds(count: int) -> float:
        begun = time.perf_counter()
        causal_lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
        return time.perf_counter() - begun

    with torch.inference_mode():
        first = seconds(1)
        return (tokens - 1) / (seconds(tokens) - first)


if __name__ == "__main__":
    name, folder, pairs = sys.argv[1:]
    measured = measure(INFER[name], Path(folder), int(pairs))
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
