#!/usr/bin/env python3
"""20 micro-steps of the code-graph encoder, cold and through a warm warmd, alternately.

    python tests/benchmarks/micro_steps.py [--runs 3] [--json]

The encoder of 107,445,664 parameters on the standard library of this Python: micro-steps of one
example (about 104 tokens), 4 to a step, so 5 steps; two validations on 4 held-out examples; a
checkpoint of 1.29 GB. Both sides find the data built. The cold side is `cold_mlm.py`. The warm one
also ranks the tails of held-out relations, and is not done before its checkpoint and its model are
on the disk for good. Prints the medians of the whole, as a user waits for it, and of the parts.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import cold_warm
from cold_warm import Seconds
from own_daemon import own_daemon

MICRO_STEPS, ACCUMULATION, EVAL_EVERY, EVAL_EXAMPLES = 20, 4, 3, 4


def cold(cache: Path) -> Seconds:
    """Run the script; return the seconds of its parts and in all."""
    sizes = (MICRO_STEPS, ACCUMULATION, EVAL_EVERY, EVAL_EXAMPLES)
    with tempfile.TemporaryDirectory() as output:
        return cold_warm.cold("cold_mlm.py", cache, output, *sizes)


def warm(home: Path, **changes: int) -> Seconds:
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
    events, total = cold_warm.submitted(home, "mlm", *words)
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
    with own_daemon() as client:
        home = client.config.home
        warm(home, layers=1, steps=1)  # builds the data, for both
        (cache,) = home.rglob("corpora")
        pairs = [(cold(cache), warm(home)) for _ in range(args.runs)]
    cold_warm.print_medians(pairs, as_json=args.json, digits=2)


if __name__ == "__main__":
    main()
