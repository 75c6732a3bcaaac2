#!/usr/bin/env python3
"""The same short GRPO job as a cold TRL script and through a warm warmd, in turn, several times.

    python tests/benchmarks/cold_and_warm.py MODEL DATASET [--steps 5] [--runs 5] [--json]

DATASET is a JSONL file of question/answer rows. Prints the median of the whole time, as a user
waits for it (process start to end; `warmd submit --wait` to end), and of each part.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}


def cold(model: str, dataset: str, steps: int) -> dict[str, float]:
    """Run the script; return the seconds of its parts and in all."""
    with tempfile.TemporaryDirectory() as output:
        begun = time.perf_counter()
        command = [sys.executable, str(HERE / "cold_grpo.py"), model, dataset, output]
        done = subprocess.run(
            [*command, "--steps", str(steps)],
            env=OFFLINE,
            capture_output=True,
            text=True,
            check=True,
        )
        total = time.perf_counter() - begun
    parts: dict[str, float] = json.loads(done.stderr.strip().splitlines()[-1])
    return {**parts, "total": total}


def warm(home: str, dataset: str, steps: int) -> dict[str, float]:
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
    words = [str(word) for pair in options.items() for word in pair]
    begun = time.perf_counter()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "warmd.cli", "--home", home),
            *("submit", "grpo", *words, "--wait", "--json"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    total = time.perf_counter() - begun
    events = [event for event in map(json.loads, done.stdout.splitlines()) if "seq" in event]
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
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    model, dataset = (str(Path(path).resolve()) for path in (args.model, args.dataset))
    with tempfile.TemporaryDirectory(prefix="warmd-") as home:
        control = [sys.executable, "-m", "warmd.cli", "--home", home]
        subprocess.run([*control, "start", "--model", f"model={model}"], check=True)
        try:
            pairs = [
                (cold(model, dataset, args.steps), warm(home, dataset, args.steps))
                for _ in range(args.runs + 1)
            ][1:]
        finally:
            subprocess.run([*control, "stop", "--now"], check=True)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in zip(("cold", "warm"), zip(*pairs, strict=True), strict=True)
    }
    ratio = statistics.median(c["total"] / w["total"] for c, w in pairs)
    if args.json:
        sys.stdout.write(json.dumps({**medians, "ratio": ratio}) + "\n")
        return
    for name, parts in medians.items():
        row = "  ".join(f"{key} {value:.3f}" for key, value in parts.items())
        sys.stdout.write(f"{name}  {row}\n")
    sys.stdout.write(f"cold / warm: {ratio:.1f}\n")


if __name__ == "__main__":
    main()
