"""Decoding of one request: transformers' generate, the engine, the memory-bandwidth limit.

    python -m warmd.jobs.bench.infer WORK FOLDER PAIRS

FOLDER holds the model (`model.py`). The sides alternate in one process. Prompts are random words,
and nothing is drafted. Prints one JSON object: tokens per second. Imports torch and transformers.
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
from ..engine.request import End, Request, Sampling
from ..engine.speculation import NoDrafts
from . import machine, model
from .apart import apart
from .works import INFER, WEIGHT_BYTES, InferWork

WARM_UP_TOKENS = 40  # after which the engine has packed all layers


def measure(work: InferWork, folder: Path, pairs: int) -> dict[str, Any]:
    """Return the decode speed of each round, in tokens/s, of `stock` and of each precision.

    Prefill and the first token do not count. `bytes_s`: memory bandwidth per precision, measured
    just before it, since it varies on a shared machine; `weights`: their number. Precisions without
    a kernel for this processor are left out.
    """
    causal_lm = model.read(folder)
    causal_lm.generation_config.eos_token_id = None  # every answer has all its tokens
    tokenizer = model.tokenizer(work.shape)
    tokenizer.eos_token = None
    warm = WarmModel(name="bench", path=folder, model=causal_lm, tokenizer=tokenizer)
    words = random.Random(0)

    def prompt() -> list[int]:
        return [words.randrange(10, work.shape.vocab_size) for _ in range(work.prompt)]

    engines: dict[str, Engine] = {}
    for precision in WEIGHT_BYTES:
        engine = Engine(warm, precision=precision, speculation=NoDrafts())
        _engine_speed(engine, prompt(), max(WARM_UP_TOKENS, work.completion))
        if engine.precision == precision:
            engines[precision] = engine
        else:
            engine.close()
    while any(engine.has_idle_work for engine in engines.values()):
        time.sleep(0.1)  # idle work would slow the measurement
    found: dict[str, list[float]] = {name: [] for name in ("stock", *engines)}
    bytes_s: dict[str, list[float]] = {precision: [] for precision in engines}
    for _ in range(pairs):
        found["stock"].append(apart(partial(_stock_speed, causal_lm, prompt(), work.completion)))
        for precision, engine in engines.items():
            bytes_s[precision].append(apart(machine.measure).bytes_s)
            found[precision].append(_engine_speed(engine, prompt(), work.completion))
    for engine in engines.values():
        engine.close()
    rest = {"device": machine.device().type, "weights": causal_lm.num_parameters()}
    return {**found, "bytes_s": bytes_s, **rest}


def _engine_speed(engine: Engine, ids: list[int], tokens: int) -> float:
    """Return the tokens per second of the engine after the first token."""
    request = Request(ids=ids, sampling=Sampling(temperature=0), max_tokens=tokens)
    engine.submit(request)
    while not isinstance(piece := request.pieces.get(), End):
        pass
    if piece.error is not None:
        raise piece.error
    return (tokens - 1) / request.stats.decode_s


def _stock_speed(causal_lm: Any, prompt: list[int], tokens: int) -> float:
    """Return the tokens per second of transformers' generate after the first token."""
    ids = torch.tensor([prompt], device=causal_lm.device)
    times: list[float] = []

    def note_time(ids: torch.Tensor, scores: Any) -> torch.Tensor:
        machine.synchronize()
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def generate(count: int) -> None:
        times.clear()
        causal_lm.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
            stopping_criteria=[note_time],  # called after each token
        )

    with torch.inference_mode():
        generate(1)  # warm up: the first call in a thread is slower
        generate(tokens)
    return (tokens - 1) / (times[-1] - times[0])


if __name__ == "__main__":
    name, folder, pairs = sys.argv[1:]
    measured = measure(INFER[name], Path(folder), int(pairs))
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
