#!/usr/bin/env python3
"""The same short GRPO job as a cold TRL script and through a warm warmd, alternately.

    python tests/benchmarks/cold_and_warm.py MODEL DATASET [--steps 5] [--runs 5]
                                              [--threads 1] [--json]

DATASET is a JSONL file of question/answer rows. Both sides compute with --threads threads: one is
the best of both for a small model. Prints the median of the whole time, as a user
waits for it (process start to end; `warmd submit --wait` to end), and of each part.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import cold_warm
from cold_warm import Seconds
from own_daemon import own_daemon

from warmd.configs.config import WorkerConfig


def cold(model: str, dataset: str, steps: int, threads: int) -> Seconds:
    """Run the script; return the seconds of its parts and in all."""
    sizes = ("--steps", steps, "--threads", threads)
    with tempfile.TemporaryDirectory() as output:
        return cold_warm.cold("cold_grpo.py", model, dataset, output, *sizes)


def warm(home: Path, dataset: str, steps: int) -> Seconds:
    """Submit the same job and wait; return the seconds of its parts and in all."""
    options = {
        "--model": "model",
        "--dataset": dataset,
        "--samples": steps,
        "--num-generations": 4,
        "--max-completion-length": 24,
        "--reward": "math",
        "--learning-rate": "1e-4",
        "--save-every": steps,
        "--seed": 7,
    }
    words = [word for pair in options.items() for word in pair]
    events, total = cold_warm.submitted(home, "grpo", *words)
    at = {event["type"]: event for event in reversed(events)}
    first = next(event for event in events if event["type"] == "step")
    in_horse = at["finished"]["time"] - at["started"]["time"]
    return {
        "command_line": total - in_horse - at["started"]["queued_s"],
        "queued_and_fork": at["started"]["queued_s"],
        "data": at["begin"]["data_s"],
        "trainer": at["begin"]["trainer_s"],
        "first_step": first["time"] - at["begin"]["time"],
        "steps_after_first": at["finished"]["time"] - first["time"],
        "total": total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", help="model folder")
    parser.add_argument("dataset", help="JSONL file of question/answer rows")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--runs", type=int, default=5, help="of each, in turn, after one of each")
    parser.add_argument("--threads", type=int, default=1, help="of both sides")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    model, dataset = (str(Path(path).resolve()) for path in (args.model, args.dataset))
    worker = WorkerConfig(name="train-0", queue="train", threads=args.threads)
    with own_daemon(f"model={model}", workers=(worker,)) as client:
        home = client.config.home
        pairs = [
            (cold(model, dataset, args.steps, args.threads), warm(home, dataset, args.steps))
            for _ in range(args.runs + 1)
        ][1:]
    cold_warm.print_medians(pairs, as_json=args.json, digits=3)


if __name__ == "__main__":
    main()
