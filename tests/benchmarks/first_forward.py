#!/usr/bin/env python3
"""The time from the fork to the first forward pass of a GRPO job, by the events of real jobs.

    python tests/benchmarks/first_forward.py MODEL DATASET [--jobs 5] [--json]

MODEL is a folder, say one with a 0.5B model; DATASET a JSONL file such as GSM8K's. Every job is
killed after its first step, of 2 completions of 8 tokens, which is what ends the clock: a step's
event says how long it took, and the first forward is right at its begin (in jobs with clocks in the
code, 2 to 3 ms later). A job with a reference takes 10 GB with a model of 0.5B. The first one is
left out of the figures: what it reads from the disk, the others find in memory.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import orjson
from own_daemon import kill, own_daemon, submit_until

from warmd.daemon.client.client import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="model folder to keep warm")
    parser.add_argument("dataset", type=Path, help="JSONL file with at least 80 problems")
    parser.add_argument("--jobs", type=int, default=5, help="jobs to time, after a first one")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with own_daemon(f"model={args.model}") as client:
        jobs = [parts(first_step(client, args.dataset)) for _ in range(1 + args.jobs)][1:]
    figures = {
        part: {
            "median_ms": statistics.median(job[part] for job in jobs) * 1e3,
            "max_ms": max(job[part] for job in jobs) * 1e3,
        }
        for part in jobs[0]
    }
    if args.json:
        sys.stdout.write(orjson.dumps({"jobs": len(jobs), **figures}).decode() + "\n")
        return
    sys.stdout.write(f"{'':32} {'median':>10} {'max':>10}\n")
    for part, row in figures.items():
        sys.stdout.write(f"{part:32} {row['median_ms']:>7.1f} ms {row['max_ms']:>7.1f} ms\n")


def first_step(client: Client, dataset: Path) -> dict[str, dict[str, Any]]:
    """Run a job to its first step and kill it; return its events by their types."""
    job_id, events = submit_until(
        client,
        "step",
        "grpo",
        model="model",
        dataset=str(dataset.resolve()),
        num_generations=2,
        batch_size=1,
        max_completion_length=8,
        beta=0.1,
        reward=["math"],
    )
    kill(client, job_id)
    return events


def parts(events: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Seconds from the fork to the start of the first step, by part."""
    started, begin, step = events["started"], events["begin"], events["step"]
    begun = step["time"] - step["generation_s"] - step["training_s"]
    forked = started["time"] - started["fork_s"]
    return {
        "fork, spec": started["fork_s"],
        "problems, tokens, configuration": begin["data_s"],
        "model's clone, trainer": begin["trainer_s"],
        "optimizer, first batch": begun - begin["time"],
        "from the fork to the first step": begun - forked,
    }


if __name__ == "__main__":
    main()
