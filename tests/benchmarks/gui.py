"""A GUI agent's request, completed by the engine and by transformers in the same run.

    python tests/benchmarks/gui.py MODEL REQUEST [--thumbnail 800] [--tokens 94] [--skip stock]

MODEL is the folder of a model of the Qwen2-VL family, REQUEST a JSON list of messages with a
screenshot. All tokens are forced: no answer ends early. For each way, stock (transformers in the
model's dtype), int8, bf16 (where this machine serves it) and native: the seconds of a first turn,
by phase, and of a second turn that adds one line to it. A 2B model takes 18 GB. Every line of the
output includes the load average. `--skip` leaves out formats, to run the others separately.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from warmd.jobs.bench import machine
from warmd.jobs.bench.apart import apart
from warmd.jobs.compute.allocator import keep_freed_memory
from warmd.jobs.compute.threads import without_helpers
from warmd.jobs.context import WarmModel
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.image_tokens import insert_image_tokens
from warmd.jobs.engine.images import Budget
from warmd.jobs.engine.request import End, Image, Request, Sampling
from warmd.jobs.models import image_parts

GREEDY = Sampling(temperature=0)
WAYS = ("stock", "int8", "bf16", "native")
SECOND = "It did nothing. Try another way."


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("request", type=Path)
    parser.add_argument("--thumbnail", type=int, default=800)
    parser.add_argument("--tokens", type=int, default=94)
    parser.add_argument("--skip", action="append", default=[], choices=WAYS)
    args = parser.parse_args()

    warm = endless(args.model)
    model = warm.model
    messages = json.loads(args.request.read_text())
    budget = Budget(thumbnail=args.thumbnail)
    first = encode(warm, messages, budget)
    log(f"{len(first[0])} tokens, {sum(p.num_tokens for p in first[1])} of them of images")

    rates = apart(machine.measure)
    log(f"memory: {rates.bytes_s / 1e9:.1f} GB/s, products: {rates.flops / 1e9:.0f} GFLOP/s")
    if "stock" not in args.skip:
        begun = time.perf_counter()
        apart(partial(stock, model, *first, 1))
        log(f"stock: vision and prompt {time.perf_counter() - begun:.1f} s")
        begun = time.perf_counter()
        apart(partial(stock, model, *first, args.tokens))
        log(f"stock: first turn {time.perf_counter() - begun:.1f} s")
    for precision in WAYS[1:]:
        if precision in args.skip:
            continue
        begun = time.perf_counter()
        engine = Engine(warm, precision=precision)
        answer(engine, encode(warm, [{"role": "user", "content": "?"}], budget), 40)
        if engine.precision != precision:
            log(f"{precision}: not faster here")
            continue
        while engine.has_idle_work:
            time.sleep(0.1)
        log(f"{precision}: ready after {time.perf_counter() - begun:.1f} s")
        text = answer(engine, first, args.tokens, f"{precision}: first turn")
        said = [{"role": "assistant", "content": text}, {"role": "user", "content": SECOND}]
        second = encode(warm, messages + said, budget)
        answer(engine, second, args.tokens, f"{precision}: second turn of {len(second[0])} tokens")
        engine.close()


def endless(folder: Path) -> WarmModel:
    """Read a model without an end token: every completion has all requested tokens."""
    auto: Any = transformers.AutoModelForImageTextToText
    model = auto.from_pretrained(folder).requires_grad_(False).eval()
    model.generation_config.eos_token_id = None
    keep_freed_memory()  # as a work horse does
    with without_helpers():
        for parameter in model.parameters():  # as warm as the zygote's: in memory, not on the disk
            parameter.sum()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = None
    return WarmModel(name="m", path=folder, model=model, tokenizer=tokenizer)


def log(line: str) -> None:
    sys.stdout.write(f"{line}   (load {os.getloadavg()[0]:.1f})\n")
    sys.stdout.flush()


def encode(
    warm: WarmModel, messages: list[dict[str, Any]], budget: Budget
) -> tuple[list[int], list[Image]]:
    chat, urls = image_parts.split(messages)
    text = warm.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    ids = warm.tokenizer(text, add_special_tokens=False)["input_ids"]
    return insert_image_tokens(warm, ids, urls, budget)


def stock(model: Any, ids: list[int], images: list[Image], tokens: int) -> None:
    tensor = torch.tensor([ids])
    model.generate(
        tensor, attention_mask=torch.ones_like(tensor), do_sample=False, max_new_tokens=tokens,
        min_new_tokens=tokens, pad_token_id=0,
        pixel_values=torch.cat([image.patches() for image in images]),
        image_grid_thw=torch.tensor([image.grid for image in images]),
        mm_token_type_ids=(tensor == model.config.image_token_id).int(),
    )  # fmt: skip


def answer(
    engine: Engine, prompt: tuple[list[int], list[Image]], tokens: int, name: str = ""
) -> str:
    ids, images = prompt
    requested = Request(ids=ids, images=images, sampling=GREEDY, max_tokens=tokens)
    begun = time.perf_counter()
    engine.submit(requested)
    text = ""
    while not isinstance(piece := requested.pieces.get(), End):
        text += piece.text
    if piece.error is not None:
        raise piece.error
    if name:
        m = requested.stats
        log(
            f"{name} {time.perf_counter() - begun:.1f} s: vision {m.vision_s:.1f}, prompt "
            f"{m.prefill_s:.1f} ({m.cached_tokens} tokens known), decode {m.decode_s:.1f}"
        )
    return text


if __name__ == "__main__":
    main()
