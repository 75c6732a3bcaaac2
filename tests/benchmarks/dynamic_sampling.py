"""The effect of dynamic sampling and replay on learning per minute, with the demo model.

python tests/benchmarks/dynamic_sampling.py [--seeds N]

For each way of sampling: the reward on 400 held-out sums, before and after; the seconds of
training (generation and updates); the groups without a difference of rewards. Three minutes.
"""

from __future__ import annotations

import statistics
import sys
from itertools import product
from pathlib import Path
from typing import Any

import click
from own_daemon import own_daemon

from warmd.daemon.client.client import Client
from warmd.jobs import spec_class

DEMO = Path(__file__).resolve().parents[2] / "configs" / "demo"
WAYS: dict[str, dict[str, Any]] = {
    "usual": {},
    "usual, 400 steps": {"epochs": 5},  # about as long as the ways below take
    "resample 4": {"resample": 4},
    "replay 8": {"replay": 8},
    "both": {"resample": 4, "replay": 8},
}
JOB = {
    "samples": 80,
    "epochs": 3,  # replay acts from the second one on
    "eval_samples": 400,
    "learning_rate": 2e-4,
    "lr_scheduler": "constant",
    "save_every": "1000",
}


TASKS: dict[str, dict[str, Any]] = {"groups of 8": {}, "groups of 4": {"num_generations": 4}}


def trained(client: Client, **options: Any) -> dict[str, float]:
    """Run a job; return its rewards, seconds, and counts of groups."""
    job_id = client.jobs.submit(spec_class("grpo").parse(JOB | options))
    events = [event for event in client.jobs.follow(job_id) if event is not None]
    steps = [event for event in events if event["type"] == "step"]
    before, after = (event["reward"] for event in events if event["type"] == "eval")
    seconds = sum(step["generation_s"] + step["training_s"] for step in steps)
    return {
        "before": before,
        "after": after,
        "seconds": seconds,
        "gain/min": (after - before) / seconds * 60,
        "flat": sum(step["reward_std"] == 0 for step in steps),
        "resampled": sum(step.get("resampled", 0) for step in steps),
        "replayed": sum(step.get("replayed", 0) for step in steps),
    }


@click.command()
@click.option("--seeds", default=3, help="number of seeds")
def main(seeds: int) -> None:
    """Print a line for each task, way and seed, then the means over the seeds."""
    with own_daemon(f"demo={DEMO}") as client:
        trained(client, steps=5)  # loads and compiles what would otherwise count for the first job
        for task, way in product(TASKS, WAYS):
            options = TASKS[task] | WAYS[way]
            runs = [trained(client, seed=seed, **options) for seed in range(seeds)]
            means = {name: statistics.mean(run[name] for run in runs) for name in runs[0]}
            for label, run in [*enumerate(runs), ("mean", means)]:
                values = "  ".join(f"{name} {value:.3g}" for name, value in run.items())
                sys.stdout.write(f"{task}  {way:16}  seed {label}  {values}\n")


if __name__ == "__main__":
    main()
