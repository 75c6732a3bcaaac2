#!/usr/bin/env python3
"""The memory of every process under thousands of requests over HTTP.

    python tests/benchmarks/steady.py MODEL [--requests 10000] [--at-once 32] [--samples 10]

MODEL is the folder of a small model. Requests of mixed lengths, every fourth as a stream, every
eighth given up by its client after the first text. Prints the private memory of every process of
the daemon after each part of them, and what the second half of the requests added. Answers are kept
as configured by default, on disk and in Redis; `server` is the daemon's own Valkey.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import openai
import orjson
import psutil
from own_daemon import api_of, own_daemon

from warmd.daemon.client import control
from warmd.daemon.client.client import Client

WORDS = ("once", "upon", "a", "time", "there", "was", "little", "dog", "and", "girl")
PATIENCE_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--samples", type=int, default=10, help="how often memory is measured")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    if args.samples < 2:
        parser.error("--samples: must be at least 2, one at the half of the requests")
    drawn = random.Random(0)
    seen: list[dict[str, float]] = []
    part = args.requests // args.samples
    with own_daemon(f"model={args.model}", http_port=0) as client:
        url = api_of(client)
        begun = time.perf_counter()
        for sample in range(args.samples):
            asyncio.run(answer(url, drawn, range(sample * part, (sample + 1) * part), args.at_once))
            seen.append(private_mb(client))
            if not args.json:
                parts = "  ".join(f"{name} {mb:.0f}" for name, mb in seen[-1].items())
                sys.stdout.write(f"{(sample + 1) * part:>7} requests, MB: {parts}\n")
                sys.stdout.flush()
        seconds = time.perf_counter() - begun
    half = seen[args.samples // 2 - 1]
    grown = {name: seen[-1][name] - half[name] for name in seen[-1] if name in half}
    if args.json:
        figures = {"requests_per_s": part * args.samples / seconds, "mb": seen, "grown_mb": grown}
        sys.stdout.write(orjson.dumps(figures).decode() + "\n")
        return
    sys.stdout.write(f"{part * args.samples / seconds:.0f} requests/s; the second half added, MB: ")
    sys.stdout.write("  ".join(f"{name} {mb:+.1f}" for name, mb in grown.items()) + "\n")


async def answer(url: str, drawn: random.Random, numbers: range, at_once: int) -> None:
    slots = asyncio.Semaphore(at_once)
    async with openai.AsyncOpenAI(base_url=url, api_key="unused", timeout=PATIENCE_S) as client:

        async def one(number: int, prompt: str, tokens: int) -> None:
            async with slots:
                create: Any = client.completions.create  # its type wants to know of stream
                ask_for = partial(create, model="model", prompt=prompt, max_tokens=tokens)
                if number % 4:
                    await ask_for()
                    return
                async with await ask_for(stream=True) as stream:
                    async for _ in stream:
                        if number % 8 == 0:
                            return

        await asyncio.gather(
            *(
                one(n, " ".join(drawn.choices(WORDS, k=drawn.randrange(1, 60))), 1 + n % 16)
                for n in numbers
            )
        )


def private_mb(client: Client) -> dict[str, float]:
    """The private memory of each process of the daemon, by what it is."""
    supervisor = psutil.Process(control.status(client.config)["daemon"]["pid"])
    found: dict[str, float] = {}
    for process in (supervisor, *supervisor.children(recursive=True)):
        memory = process.memory_full_info()
        name = _role(process)
        while name in found:
            name += "'"
        found[name] = (memory.uss + memory.swap) / 1e6
    return found


def _role(process: psutil.Process) -> str:
    words = process.cmdline()
    modules = [word for word in words if word.startswith("warmd.")]
    if not modules:
        return "server"
    role = modules[0].rpartition(".")[2]
    parent = process.parent()
    is_forked = parent is not None and parent.cmdline() == words and role == "zygote"
    return "horse" if is_forked else {"daemon": "supervisor"}.get(role, role)


if __name__ == "__main__":
    main()
