#!/usr/bin/env python3
"""16 mixed requests over HTTP: warmd concurrently and one by one, and `transformers serve`.

    python tests/benchmarks/serve.py MODEL [--requests 16] [--tokens 48] [--rounds 3] [--json]

MODEL is a folder. One server runs at a time, each anew in every round. OpenAI's client sends the
requests, greedy: prompts of 16 to 115 random tokens, completions of 8 to --tokens tokens.
`transformers serve` gets all requests at once: with its defaults, and with --continuous-batching
and as many blocks as the work needs (its default takes nearly all memory). Each is warmed up by a
round that does not count, and no token ends a completion early.

Prints completion tokens per second, each with the number that the machine's float32 matrix
multiplication rate and memory bandwidth allow. On a shared machine these change from minute to
minute, so both are measured right before and right after the requests, and averaged.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import openai
import orjson
import torch
import transformers
from own_daemon import api_of, own_daemon

from warmd.daemon.host.parent_death import tied_to_parent
from warmd.jobs.bench import machine

PATIENCE_S = 300  # for a server to be ready
SETTLING_S = 10  # warmd packs weights while it is idle
BATCHING = ("--continuous-batching", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "512")

Request = tuple[str, int]  # prompt, tokens to write
Server = Callable[[], AbstractContextManager[tuple[str, str]]]  # its URL and its model's name


@dataclass(frozen=True)
class Way:
    """How requests are sent to a server."""

    server: str
    at_once: int

    def __str__(self) -> str:
        return f"{self.server}, {'one by one' if self.at_once == 1 else 'at once'}"


@dataclass(frozen=True)
class Answered:
    """The result of one round: tokens per second, and the machine's rates at that time."""

    tokens_s: float
    allowed_s: float  # tokens per second that the rates allow
    flops: float
    bytes_s: float

    def __str__(self) -> str:
        return (
            f"{self.tokens_s:6.1f} tok/s, {self.tokens_s / self.allowed_s:4.0%} of the "
            f"{self.allowed_s:5.1f} that {self.flops / 1e9:.0f} GFLOP/s and "
            f"{self.bytes_s / 1e9:.1f} GB/s allow"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="of the longest completion")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip", action="append", default=[], choices=["stock"])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with endless(args.model.resolve()) as folder:
        found = measure_all(folder, args)
    if args.json:
        plain = {str(way): [asdict(one) for one in ones] for way, ones in found.items()}
        sys.stdout.write(orjson.dumps(plain).decode() + "\n")
        return
    together, alone = found[Way("warmd", args.requests)], found[Way("warmd", 1)]
    ratios = [
        (a.tokens_s / b.tokens_s, a.allowed_s / b.allowed_s)
        for a, b in zip(together, alone, strict=True)
    ]
    each = ", ".join(f"{ratio:.1f} of {limit:.1f}" for ratio, limit in ratios)
    sys.stdout.write(f"warmd at once by one by one, of what is allowed: {each}\n")
    theirs = [_median(ones) for way, ones in found.items() if way.server != "warmd"]
    if theirs:
        times = _median(together) / max(theirs)
        sys.stdout.write(f"warmd at once: {times:.1f} times the best of transformers serve\n")


@contextmanager
def endless(model: Path) -> Iterator[Path]:
    """Yield a folder of the same model without an end-of-sequence token."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, model.name)
        folder.mkdir()
        for file in model.iterdir():
            if file.name in ("config.json", "generation_config.json", "tokenizer_config.json"):
                values = orjson.loads(file.read_bytes())
                kept = {key: value for key, value in values.items() if not key.startswith("eos_")}
                (folder / file.name).write_bytes(orjson.dumps(kept))
            else:
                (folder / file.name).symlink_to(file)
        yield folder


def measure_all(folder: Path, args: argparse.Namespace) -> dict[Way, list[Answered]]:
    """Send the requests to each server in each way, for some rounds; print each figure, or JSON."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    # Words that are one token each, with the space before them.
    words = [word[1:] for word in tokenizer.get_vocab() if re.fullmatch("Ġ[a-z]{2,}", word)]
    servers: dict[str, tuple[Server, list[int]]] = {
        "warmd": (partial(warmd, folder), [args.requests, 1])
    }
    if "stock" not in args.skip:
        batching = partial(stock, folder, *BATCHING)
        servers["transformers serve, batching"] = batching, [args.requests]
        servers["transformers serve"] = partial(stock, folder), [args.requests]
    found: dict[Way, list[Answered]] = {}
    for number in range(args.rounds):
        for name, (server, numbers) in servers.items():
            with server() as (url, model):
                warming = requests(words, args.requests, args.tokens, seed="to warm up")
                asyncio.run(ask(url, model, warming, args.requests))
                time.sleep(SETTLING_S)
                for way in (Way(name, at_once) for at_once in numbers):
                    # New ones every time, so that no prefix is cached.
                    requested = requests(words, args.requests, args.tokens, seed=f"{number} {way}")
                    answered = measure(folder, url, model, requested, way)
                    found.setdefault(way, []).append(answered)
                    if not args.json:
                        sys.stdout.write(f"{way!s:42}{answered}\n")
                        sys.stdout.flush()
    return found


def measure(folder: Path, url: str, model: str, requested: Sequence[Request], way: Way) -> Answered:
    """Send the requests once; the rates are the means of those right before and right after."""
    before = machine.measure()
    tokens_s = asyncio.run(ask(url, model, requested, way.at_once))
    after = machine.measure()
    flops = (before.flops + after.flops) / 2
    bytes_s = (before.bytes_s + after.bytes_s) / 2
    return Answered(tokens_s, allowed(folder, requested, way, flops, bytes_s), flops, bytes_s)


def _median(ones: Sequence[Answered]) -> float:
    return statistics.median(one.tokens_s for one in ones)


def allowed(
    model: Path, requested: Sequence[Request], way: Way, flops: float, bytes_s: float
) -> float:
    """Return the tokens per second that these rates allow in float32.

    The layers compute every token, the head only those behind which a new one is written. One by
    one, all weights are read for each new token but the first, which comes with the prompt.
    """
    with torch.device("meta"):
        causal_lm = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.from_pretrained(model)
        )
    head = causal_lm.get_output_embeddings()
    of_head = head.weight.numel()
    of_layers = -of_head + sum(
        layer.weight.numel() for layer in causal_lm.modules() if isinstance(layer, torch.nn.Linear)
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    read = sum(len(tokenizer(prompt)["input_ids"]) for prompt, _ in requested)
    written = sum(tokens for _, tokens in requested)
    prompts_s = 2 * (read * of_layers + len(requested) * of_head) / flops
    weight_s = 2 / flops if way.at_once > 1 else max(2 / flops, 4 / bytes_s)
    steps_s = (written - len(requested)) * weight_s * (of_layers + of_head)
    total_s: float = prompts_s + steps_s
    return written / total_s


def requests(words: Sequence[str], count: int, tokens: int, *, seed: str) -> list[Request]:
    drawn = random.Random(seed)
    return [
        (
            "".join(f" {word}" for word in drawn.choices(words, k=16 + 23 * n % 100)),
            8 + 13 * n % (tokens - 7),
        )
        for n in range(count)
    ]


async def ask(url: str, model: str, requested: Sequence[Request], at_once: int) -> float:
    """Completion tokens per second, with some requests at a time."""
    slots = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", timeout=PATIENCE_S) as client:

        async def one(prompt: str, tokens: int) -> int:
            async with slots:
                answer = await client.completions.create(
                    model=model, prompt=prompt, max_tokens=tokens, temperature=0.0
                )
            assert answer.usage is not None
            assert answer.usage.completion_tokens == tokens
            return answer.usage.completion_tokens

        begun = time.perf_counter()
        written = await asyncio.gather(*(one(*request) for request in requested))
        return sum(written) / (time.perf_counter() - begun)


@contextmanager
def stock(model: Path, *options: str) -> Iterator[tuple[str, str]]:
    """Run transformers' server; give its URL and the name of the model there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("transformers")),
        "serve", str(model), "--host", "127.0.0.1", "--port", str(port),
        "--device", "cpu", "--dtype", "float32", "--log-level", "error", *options,
    ]  # fmt: skip
    with subprocess.Popen(
        tied_to_parent(command), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + PATIENCE_S
            while not _answers(f"http://127.0.0.1:{port}/health"):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("transformers serve does not answer")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1", str(model)
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


@contextmanager
def warmd(model: Path) -> Iterator[tuple[str, str]]:
    """Run a daemon; give its URL and the name of the model there."""
    with own_daemon(f"model={model}", http_port=0) as client:
        yield api_of(client), "model"


if __name__ == "__main__":
    main()
