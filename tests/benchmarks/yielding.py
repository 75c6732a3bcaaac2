#!/usr/bin/env python3
"""The delay of a short inference while a training job takes all cores.

    python tests/benchmarks/yielding.py MODEL DATASET [--rounds 4] [--runs 12] [--nice 15] [--json]

Both models are MODEL, a folder. The inference is an `infer` job of a few greedy tokens through a
resident worker, timed from its first line to its result, so that what is measured is the processor
and not the queue. The training is a GRPO job on all cores at the niceness given, held (`pause`)
while the idle half of a round is measured: the two halves differ in nothing else. Compare the
medians; --nice 0 shows what it is like when training does not yield.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import orjson
from own_daemon import own_daemon, submit_until

from warmd.configs.config import WorkerConfig
from warmd.configs.values import num_cores
from warmd.daemon.client.client import Client
from warmd.daemon.runs import events

REQUEST = {"prompt": "Once upon a time", "max_tokens": 16, "temperature": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="model folder to infer with and to train")
    parser.add_argument("dataset", type=Path, help="JSONL of prompts and answers to train on")
    parser.add_argument("--rounds", type=int, default=4, help="times that both halves are measured")
    parser.add_argument("--runs", type=int, default=12, help="inferences in a half")
    parser.add_argument("--nice", type=int, default=15, help="of the training's horse")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"idle": [], "training": []}
    workers = (
        WorkerConfig(name="train-0", queue="train", nice=args.nice, threads=num_cores()),
        WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=8),
    )
    with own_daemon(f"model={args.model}", workers=workers) as client:
        training = start_training(client, args.dataset.resolve())
        infer(client)  # the first makes the engine
        for _ in range(args.rounds):
            steer(client, training, client.jobs.pause, "paused")
            seconds["idle"] += [infer(client) for _ in range(args.runs)]
            steer(client, training, client.jobs.unpause, "unpaused")
            seconds["training"] += [infer(client) for _ in range(args.runs)]
    medians = {name: statistics.median(values) * 1e3 for name, values in seconds.items()}
    ratio = medians["training"] / medians["idle"]
    if args.json:
        figures = {"nice": args.nice, "median_ms": medians, "ratio": ratio}
        sys.stdout.write(orjson.dumps(figures).decode() + "\n")
        return
    for name, median_ms in medians.items():
        sys.stdout.write(f"{name:10} {len(seconds[name]):>5} runs {median_ms:>8.1f} ms median\n")
    sys.stdout.write(f"ratio {ratio:.2f} at nice {args.nice}\n")


def start_training(client: Client, dataset: Path) -> str:
    """Submit a training that outlasts the measurement, and wait for its first step."""
    job_id, _ = submit_until(
        client,
        "step",
        "grpo",
        model="model",
        dataset=str(dataset),
        epochs=1000,
        num_generations=4,
        max_completion_length=16,
        save_every="1000m",
    )
    return job_id


def steer(client: Client, job_id: str, ask: Callable[[str], str], type: str) -> None:
    """Send a request to the training, and wait for the event that confirms it."""
    before = number(client, job_id, type)
    ask(job_id)
    while number(client, job_id, type) == before:
        watch(client, job_id)


def number(client: Client, job_id: str, type: str) -> int:
    """How many events of a type there are."""
    return sum(event["type"] == type for event in events.read(client.rundir(job_id).events))


def watch(client: Client, job_id: str) -> None:
    """Let a moment pass. Raises RuntimeError when the training has ended."""
    if client.jobs.get(job_id)["status"] not in ("queued", "started"):
        raise RuntimeError(f"the training ended: {client.jobs.get(job_id)['error']}")
    time.sleep(0.02)


def infer(client: Client) -> float:
    """The duration of one inference in its horse, in seconds."""
    _, events = submit_until(client, "finished", "infer", model="model", **REQUEST)
    return float(events["finished"]["time"] - events["started"]["time"])


if __name__ == "__main__":
    main()
