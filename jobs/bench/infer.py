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
from ..engine.request import End, Request, Sampling
from ..engine.scheduler import Engine
from . import machine, model
from .apart import apart
from .works import INFER, WEIGHT_BYTES, InferWork

WARM_UP_TOKENS = 40  # until the engine has all layers in the form that it keeps


def measure(work: InferWork, folder: Path, pairs: int) -> dict[str, Any]:
    """Return the tokens per second of each round: `stock`, `native`, `bf16` and `int8`.

    Counted from the first token on: what reading the prompt takes is left out. `bytes_s` has the
    bandwidth of memory for each precision, measured right before, for it changes on a machine that
    others use. `weights` is their number. A precision that is not served here is left out.
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
        engine = Engine(warm, precision=precision)
        _ask(engine, prompt(), max(WARM_UP_TOKENS, work.completion))
        if engine.precision == precision:
            engines[precision] = engine
        else:
            engine.close()
    while any(engine.has_idle_work for engine in engines.values()):
        time.sleep(0.1)  # their idle work would slow the measurement
    found: dict[str, list[float]] = {name: [] for name in ("stock", *engines)}
    bytes_s: dict[str, list[float]] = {precision: [] for precision in engines}
    for _ in range(pairs):
        found["stock"].append(apart(partial(_generate, causal_lm, prompt(), work.completion)))
        for precision, engine in engines.items():
            bytes_s[precision].append(apart(machine.measure).bytes_s)
            found[precision].append(_ask(engine, prompt(), work.completion))
    for engine in engines.values():
        engine.close()
    return {**found, "bytes_s": bytes_s, "weights": causal_lm.num_parameters()}


def _ask(engine: Engine, ids: list[int], tokens: int) -> float:
    request = Request(ids=ids, sampling=Sampling(temperature=0), max_tokens=tokens)
    engine.submit(request)
    while not isinstance(piece := request.pieces.get(), End):
        pass
    if piece.error is not None:
        raise piece.error
    return (tokens - 1) / request.stats.decode_s


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
        seconds(1)  # the first call of a thread has more to do
        first = seconds(1)
        return (tokens - 1) / (seconds(tokens) - first)


if __name__ == "__main__":
    name, folder, pairs = sys.argv[1:]
    measured = measure(INFER[name], Path(folder), int(pairs))
    sys.stdout.write(orjson.dumps(measured).decode() + "\n")
