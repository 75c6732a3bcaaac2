"""How close the inference engine comes to what the machine's memory allows.

    python tests/benchmarks/infer.py MODEL [--tokens 48] [--rounds 3] [--what decode --what mixed]

MODEL is the folder of a causal language model, such as a 0.5B one. Of the engine in each precision
that this machine serves and of transformers, in tokens per second: `decode`, one sequence without
its prompt, beside the floor (the bytes of the weights over the bandwidth that reading memory
reaches in the same minutes); `mixed`, 16 requests of mixed lengths with their prompts, all at once
and one by one. Rounds are interleaved; medians are printed. 7 GB for 0.5B.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from endless import endless

from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.generation import End, Generation, Sampling

GREEDY = Sampling(temperature=0)
WHAT = ("decode", "mixed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", action="append", choices=WHAT)
    args = parser.parse_args()
    what = args.what or WHAT

    warm = endless(args.model, transformers.AutoModelForCausalLM)
    model = warm.model
    weights = sum(p.numel() for p in model.parameters())

    engines: dict[str, Engine] = {}
    for precision in ("own", "bf16", "int8"):
        begun = time.perf_counter()
        engine = Engine(warm, precision=precision)
        ask(engine, [(4, 1)])
        if engine.precision != precision:
            say(f"{precision}: not faster here")
            continue
        say(f"{precision}: first token after {time.perf_counter() - begun:.1f} s")
        ask(engine, [(4, 40)])  # until all of its layers are packed
        engines[precision] = engine

    mixed = [(16 + 23 * n % 100, 8 + 13 * n % args.tokens) for n in range(16)]
    measured: dict[str, Callable[[], float]] = {"bandwidth GB/s": bandwidth()}
    if "decode" in what:
        for name, engine in engines.items():
            measured[f"decode, {name}"] = partial(decode, engine, args.tokens)
        measured["decode, transformers"] = partial(stock_decode, model, args.tokens)
    if "mixed" in what:
        for name, engine in engines.items():
            measured[f"16 mixed, {name}"] = partial(ask, engine, mixed)
            measured[f"16 mixed one by one, {name}"] = partial(ask, engine, mixed, at_once=1)
        measured["16 mixed one by one, transformers"] = partial(stock, model, mixed)
    found: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(args.rounds):
        for name, measure in measured.items():
            found[name].append(measure())
    medians = {name: statistics.median(values) for name, values in found.items()}
    for name, value in medians.items():
        say(f"{name:36} {value:8.1f}   of {' '.join(f'{v:.1f}' for v in found[name])}")
    # What writing a token reads: every weight once.
    floor = medians["bandwidth GB/s"] * 1e9 / (weights * model.dtype.itemsize)
    own = medians.get("decode, own", 0.0)
    for name in engines if own else ():
        value = medians[f"decode, {name}"]
        say(f"decode, {name}: {value / floor:.0%} of own's floor of {floor:.1f} tok/s, "
            f"{value / own:.1f} times own")  # fmt: skip
    for name in engines if "mixed" in what else ():
        gain = medians[f"16 mixed, {name}"] / medians[f"16 mixed one by one, {name}"]
        say(f"16 mixed, {name}: {gain:.1f} times one by one")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def bandwidth() -> Callable[[], float]:
    """Read a gigabyte."""
    block = torch.randn(2, 2**27)

    def measure() -> float:
        begun = time.perf_counter()
        block.sum(1)
        return block.nbytes / (time.perf_counter() - begun) / 1e9

    return measure


def ask(engine: Engine, requests: list[tuple[int, int]], *, at_once: int | None = None) -> float:
    """Tokens per second of answering (prompt tokens, new tokens), so many at once (None: all)."""
    begun = time.perf_counter()
    step = at_once or len(requests)
    for first in range(0, len(requests), step):
        asked = [
            # Of tokens that change with time, so that nothing was read before.
            Generation(ids=_prompt(length), sampling=GREEDY, max_tokens=tokens)
            for length, tokens in requests[first : first + step]
        ]
        for generation in asked:
            engine.submit(generation)
        for generation in asked:
            while not isinstance(piece := generation.pieces.get(), End):
                pass
            if piece.error is not None:
                raise piece.error
    return sum(tokens for _, tokens in requests) / (time.perf_counter() - begun)


def decode(engine: Engine, tokens: int) -> float:
    """Tokens per second of one sequence after its first token."""
    asked = Generation(ids=_prompt(32), sampling=GREEDY, max_tokens=tokens)
    engine.submit(asked)
    while not isinstance(piece := asked.pieces.get(), End):
        pass
    if piece.error is not None:
        raise piece.error
    return (tokens - 1) / asked.measures.decode_s


def stock_decode(model: Any, tokens: int) -> float:
    first, whole = (1 / stock(model, [(32, count)]) * count for count in (1, tokens))
    return (tokens - 1) / (whole - first)


def stock(model: Any, requests: list[tuple[int, int]]) -> float:
    begun = time.perf_counter()
    for length, tokens in requests:
        ids = torch.tensor([_prompt(length)])
        model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            min_new_tokens=tokens, pad_token_id=0,
        )  # fmt: skip
    return sum(tokens for _, tokens in requests) / (time.perf_counter() - begun)


def _prompt(length: int) -> list[int]:
    return torch.randint(10, 400, (length,)).tolist()


if __name__ == "__main__":
    main()
