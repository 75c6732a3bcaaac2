#!/usr/bin/env python3
"""The latency of encoding one passage of 512 tokens, in this process and by a daemon.

    python tests/benchmarks/encode.py [--shape 768x12x12] [--shape 384x6x12] [--runs 20]
                                       [--threads 2] [--json]

A shape is WIDTHxLAYERSxHEADS of a code-graph encoder with random weights, whose feed-forward
network is four times as wide. In turn, so that a change of the machine's load meets all of them:

plain        the model's forward pass as PyTorch runs it, in this process
in process   the same by jobs/encode/embedder.py, tokenizing and pooling included
int8         the same in int8
daemon       from before the submission to the `finished` event, by a resident worker of a daemon

`cpu` is processor time of all threads: on a busy machine it is more meaningful than wall time. The
floor is the time of the model's GEMMs at the fastest float32 GEMM rate that was measured in this
run.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from own_daemon import own_daemon, submit_until

from warmd.configs.config import WorkerConfig
from warmd.configs.values import num_cores
from warmd.daemon.client.client import Client
from warmd.jobs.codegraph.encoder import CodeGraphConfig, CodeGraphEncoder
from warmd.jobs.codegraph.sequences import train_tokenizer
from warmd.jobs.compute.aten_overrides import fast_kernels
from warmd.jobs.context import WarmModel
from warmd.jobs.encode.embedder import Embedder
from warmd.jobs.encode.passages import from_texts
from warmd.jobs.mlm.corpus import as_pretrained

LENGTH = 512
VOCABULARY = 8000
Measure = Callable[[], None]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", action="append", help="may be repeated; both by default")
    parser.add_argument("--runs", type=int, default=20, help="of each, in turn")
    parser.add_argument("--threads", type=int, default=num_cores(), help="by default all cores")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    code = Path(torch.__file__).with_name("functional.py").read_text()
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        tokenizer = as_pretrained(train_tokenizer([code], VOCABULARY))
        models = {
            shape: make(Path(folder, shape), shape, tokenizer)
            for shape in args.shape or ["768x12x12", "384x6x12"]
        }
        worker = WorkerConfig(
            name="infer-0", queue="infer", isolation="resident", threads=args.threads
        )
        with own_daemon(
            *(f"{name}={folder}/{name}" for name in models), workers=(worker,)
        ) as client:
            figures = {
                name: measure(name, model, tokenizer, code, client, args.runs)
                for name, model in models.items()
            }
    if args.json:
        sys.stdout.write(orjson.dumps(figures).decode() + "\n")
        return
    for name, found in figures.items():
        sys.stdout.write(
            f"{name}: {found['parameters']:,} parameters, {found['gflop']:.1f} GFLOP, floor "
            f"{found['floor_ms']:.1f} ms at {found['gflop_per_s']:.0f} GFLOP/s, cosine of int8 "
            f"{found['int8']['cosine_min']:.5f}\n"
        )
        for way, row in found["ways"].items():
            cells = "  ".join(f"{key} {value:.1f}" for key, value in row.items())
            sys.stdout.write(f"  {way:12} {cells}\n")


def make(folder: Path, shape: str, tokenizer: Any) -> Any:
    """Write an encoder of a shape and return it."""
    width, layers, heads = map(int, shape.split("x"))
    torch.manual_seed(0)
    model: Any = CodeGraphEncoder(
        CodeGraphConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=4 * width,
        )
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.requires_grad_(False).eval()


def measure(
    name: str, model: Any, tokenizer: Any, code: str, client: Client, runs: int
) -> dict[str, Any]:
    """Time every way to encode the first tokens of `code`, alternately."""
    warm = WarmModel(name=name, path=Path(), model=model, tokenizer=tokenizer)
    passages = from_texts([code])
    exact, rounded = (
        Embedder(
            warm,
            pooling="mean",
            normalize=False,
            max_length=LENGTH,
            is_int8=is_int8,
            device="cpu",
        )
        for is_int8 in (False, True)
    )
    rows = exact.rows(passages)
    rounded.prepare(rows)
    ids = torch.from_numpy(rows[0].ids.astype(np.int64)).unsqueeze(0)
    requested = {"model": name, "text": [code[: 16 * LENGTH]], "max_length": LENGTH}

    def plain() -> None:
        with torch.inference_mode():
            model.encode(ids)

    def in_process() -> None:
        exact.encode(exact.rows(passages))

    def int8() -> None:
        rounded.encode(rounded.rows(passages))

    encode_s: list[float] = []

    def daemon() -> None:
        _, events = submit_until(client, "finished", "encode", **requested)
        encode_s.append(events["finished"]["result"]["timings"]["encode_s"])

    ways: dict[str, Measure] = {
        "plain": plain,
        "in process": in_process,
        "int8": int8,
        "daemon": daemon,
    }
    clock: dict[str, list[float]] = {way: [] for way in ways}
    processor: dict[str, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        call()
    encode_s.clear()
    for _ in range(runs):
        for way, call in ways.items():
            begun, used = time.perf_counter(), time.process_time()
            call()
            clock[way].append(time.perf_counter() - begun)
            processor[way].append(time.process_time() - used)
    rate = gflop_per_s(model.config.hidden_size)
    gflop = products(model.config) / 1e9
    found = {
        way: {
            "p50_ms": statistics.median(clock[way]) * 1e3,
            "min_ms": min(clock[way]) * 1e3,
            "cpu_ms": statistics.median(processor[way]) * 1e3,
        }
        for way in ways
    }
    del found["daemon"]["cpu_ms"]  # only this process', which waits
    found["daemon"]["encode_p50_ms"] = statistics.median(encode_s) * 1e3
    return {
        "parameters": model.num_parameters(),
        "gflop": gflop,
        "gflop_per_s": rate,
        "floor_ms": gflop / rate * 1e3,
        "int8": rounded.quality(),
        "ways": found,
    }


def products(config: CodeGraphConfig) -> float:
    """The floating-point operations of a forward pass: linear layers and attention."""
    width, layers = config.hidden_size, config.num_hidden_layers
    linear = 4 * width**2 + 2 * width * config.intermediate_size
    return float(layers * (2 * LENGTH * linear + 4 * LENGTH**2 * width))


def gflop_per_s(width: int) -> float:
    """The best rate of a float32 GEMM of the shape of these layers."""
    x, weight, bias = torch.randn(LENGTH, width), torch.randn(4 * width, width), torch.zeros(1)
    bias = bias.expand(4 * width).contiguous()
    best = 0.0
    with torch.inference_mode(), fast_kernels():
        for _ in range(100):
            begun = time.perf_counter()
            torch.nn.functional.linear(x, weight, bias)
            best = max(best, 8 * LENGTH * width**2 / (time.perf_counter() - begun) / 1e9)
    return best


if __name__ == "__main__":
    main()
