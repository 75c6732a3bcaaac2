#!/usr/bin/env python3
"""A known completion of a trained model, requested in every way, alone and in a batch.

    python tests/benchmarks/stories.py MODEL PROMPT SENTENCE [--requests 32]

MODEL is the folder of a small trained model that completes PROMPT with SENTENCE, greedily.
Requested by `warmd run`, by HTTP, by HTTP as a stream, and as one of many requests at once, greedy
and sampled ones of mixed lengths, each of which must get what it gets alone. Then, in each
precision that this machine serves: the perplexity of the sentence and of the model's own longer
text, and how often the likeliest token is that of float32. Exits with 1 where an answer differs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import torch
import transformers
from own_daemon import api_of, own_daemon

from warmd.jobs.engine.decoder import Decoder
from warmd.jobs.engine.parts import Part

LONGER = 200  # generated tokens on which precisions are compared
PROMPTS = (
    "One day,",
    "Lily and her mom went to the park. They",
    "The big dog",
    "Tom was sad because",
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("sentence")
    parser.add_argument("--requests", type=int, default=32)
    args = parser.parse_args()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(args.model)
    length = len(tokenizer(args.sentence, add_special_tokens=False)["input_ids"])
    with (
        own_daemon(f"stories={args.model}", http_port=0) as daemon,
        openai.OpenAI(base_url=api_of(daemon), api_key="unused") as client,
    ):
        known = {"prompt": args.prompt, "max_tokens": length + 8, "temperature": 0.0}
        layouts: dict[str, Callable[[], str]] = {
            "warmd run": partial(run, daemon.config.home, known),
            "HTTP": partial(answer, client, known),
            "HTTP, streamed": partial(stream, client, known),
        }
        right = [report(name, way().startswith(args.sentence)) for name, way in layouts.items()]
        requests = [mixed(number, known) for number in range(args.requests)]
        alone = [answer(client, request) for request in requests]
        with ThreadPoolExecutor(len(requests)) as pool:
            streamed = [number % 3 == 2 for number in range(len(requests))]
            together = list(
                pool.map(
                    lambda request, is_stream: (stream if is_stream else answer)(client, request),
                    requests, streamed,
                )
            )  # fmt: skip
        same = sum(one == other for one, other in zip(alone, together, strict=True))
        right.append(report(f"{same} of {len(requests)} at once as alone", same == len(requests)))
        right.append(report("the sentence among them", together[0].startswith(args.sentence)))
    compare_precisions(args.model, tokenizer, args.prompt, args.sentence)
    return 0 if all(right) else 1


def report(what: str, is_right: bool) -> bool:
    log(f"{what}: {'yes' if is_right else 'NO'}")
    return is_right


def log(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def mixed(number: int, known: dict[str, Any]) -> dict[str, Any]:
    """One of many requests; every eighth is the known one."""
    if number % 8 == 0:
        return known
    request = {"prompt": PROMPTS[number % len(PROMPTS)] * (1 + number % 3)}
    if number % 2:
        return request | {"max_tokens": 5 + number * 7 % 60, "temperature": 0.0}
    return request | {"max_tokens": 5 + number * 5 % 60, "temperature": 0.8, "seed": number}


def run(home: Path, request: dict[str, Any]) -> str:
    options = [f"--{name.replace('_', '-')}={value}" for name, value in request.items()]
    command = [sys.executable, "-m", "warmd.cli", "--home", str(home), "run"]
    done = subprocess.run(
        [*command, "--model", "stories", *options], capture_output=True, text=True, check=True
    )
    return done.stdout


def answer(client: openai.OpenAI, request: dict[str, Any]) -> str:
    text: str = client.completions.create(model="stories", **request).choices[0].text
    return text


def stream(client: openai.OpenAI, request: dict[str, Any]) -> str:
    chunks = client.completions.create(model="stories", stream=True, **request)
    return "".join(chunk.choices[0].text for chunk in chunks)


def compare_precisions(folder: Path, tokenizer: Any, prompt: str, sentence: str) -> None:
    """Print the results of each precision for the same tokens."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.requires_grad_(False).eval()
    ids = tokenizer(prompt + sentence)["input_ids"]
    with torch.inference_mode():
        longer = model.generate(
            torch.tensor([ids]), do_sample=False, min_new_tokens=LONGER, max_new_tokens=LONGER,
            pad_token_id=0,
        )[0].tolist()  # fmt: skip
        likeliest: list[int] = []
        for precision in ("native", "bf16", "int8"):
            decoder = Decoder(model, precision=precision)
            if decoder.precision != precision:
                log(f"{precision}: not faster here")
                continue
            kv = decoder.new(len(longer))
            logits = torch.cat([decoder.forward([Part(kv, [token], True)]) for token in longer])
            losses = torch.nn.functional.cross_entropy(
                logits[:-1].float(), torch.tensor(longer[1:]), reduction="none"
            )
            found = logits.argmax(1).tolist()
            likeliest = likeliest or found
            agreeing = sum(a == b for a, b in zip(found, likeliest, strict=True))
            log(
                f"{precision}: perplexity {losses[: len(ids) - 1].mean().exp():.4f} of the prompt "
                f"and sentence, {losses.mean().exp():.4f} with {LONGER} tokens more; likeliest "
                f"token as in native: {agreeing} of {len(longer)}"
            )


if __name__ == "__main__":
    sys.exit(main())
