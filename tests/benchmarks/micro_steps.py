#!/usr/bin/env python3
"""20 micro-steps of the code-graph encoder, cold and through a warm warmd, in turn.

    python tests/benchmarks/micro_steps.py [--runs 3] [--json]

The encoder of 107,445,664 parameters on the standard library of this Python: micro-steps of one
example (about 104 tokens), 4 to a step, so 5 steps; two validations on 4 held-out examples; a
checkpoint of 1.29 GB. Both sides find the data built. The cold side is `cold_mlm.py`. The warm one
also ranks the tails of held-out relations, and is not done before its checkpoint and its model are
on the disk for good. Prints the medians of the whole, as a user waits for it, and of the parts.
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

MICRO_STEPS, ACCUMULATION, EVAL_EVERY, EVAL_EXAMPLES = 20, 4, 3, 4
HERE = Path(__file__).resolve().parent
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}


def cold(cache: Path) -> dict[str, float]:
    """Run the script; return the seconds of its parts and in all."""
    with tempfile.TemporaryDirectory() as output:
        begun = time.perf_counter()
        command = [sys.executable, str(HERE / "cold_mlm.py"), str(cache), output]
        command += map(str, (MICRO_STEPS, ACCUMULATION, EVAL_EVERY, EVAL_EXAMPLES))
        done = subprocess.run(command, env=OFFLINE, capture_output=True, text=True, check=True)
        total = time.perf_counter() - begun
    parts: dict[str, float] = json.loads(done.stderr.strip().splitlines()[-1])
    return {**parts, "total": total}


def warm(home: Path, **changes: int) -> dict[str, float]:
    """Submit the job and wait; return the seconds of its parts and in all."""
    steps = MICRO_STEPS // ACCUMULATION
    options = {
        "batch_size": 1,
        "gradient_accumulation": ACCUMULATION,
        "steps": steps,
        "eval_every": EVAL_EVERY,
        "validation_examples": EVAL_EXAMPLES,
        "save_every": steps,
        **changes,
    }
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    begun = time.perf_counter()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "warmd.cli", "--home", str(home)),
            *("submit", "mlm", *words, "--wait", "--json"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    total = time.perf_counter() - begun
    events = [event for event in map(json.loads, done.stdout.splitlines()) if "seq" in event]
    by_type: dict[str, list[dict[str, float]]] = {}
    for event in events:
        by_type.setdefault(str(event["type"]), []).append(event)
    (begin,) = by_type["begin"]
    training = sum(event["seconds"] for event in by_type["step"])
    evaluation = sum(event["seconds"] for event in by_type["eval"])
    in_run = by_type["finished"][-1]["time"] - begin["time"]
    return {
        "data": begin["data_s"],
        "model_and_trainer": begin["trainer_s"],
        "micro_steps_and_updates": training,
        "validations": evaluation,
        "checkpoint_and_model": in_run - training - evaluation,
        "rest": total - in_run - begin["data_s"] - begin["trainer_s"],
        "total": total,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--runs", type=int, default=3, help="of each, in turn")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        home = Path(folder)
        control = [sys.executable, "-m", "warmd.cli", "--home", folder]
        subprocess.run([*control, "start"], check=True, stdout=sys.stderr)
        try:
            warm(home, layers=1, steps=1)  # builds the data, for both
            (cache,) = home.rglob("corpora")
            pairs = [(cold(cache), warm(home)) for _ in range(args.runs)]
        finally:
            subprocess.run([*control, "stop", "--now"], check=True, stdout=sys.stderr)
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in zip(("cold", "warm"), zip(*pairs, strict=True), strict=True)
    }
    ratio = statistics.median(c["total"] / w["total"] for c, w in pairs)
    if args.json:
        sys.stdout.write(json.dumps({**medians, "ratio": ratio}) + "\n")
        return
    for name, parts in medians.items():
        row = "  ".join(f"{key} {value:.2f}" for key, value in parts.items())
        sys.stdout.write(f"{name}  {row}\n")
    sys.stdout.write(f"cold / warm: {ratio:.1f}\n")


if __name__ == "__main__":
    main()
