#!/usr/bin/env python3
"""Short training jobs, queued at once and run one after another: where their time goes.

    python tests/benchmarks/short_jobs.py [--jobs 40]

Each trains the demo model for one step of GRPO. Medians of the parts, in milliseconds.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import click
from own_daemon import own_daemon

from warmd.daemon.client.client import Client
from warmd.daemon.runs import events
from warmd.jobs import spec_class

OPTIONS = {"model": "demo", "samples": 1, "save_every": 100}
MOMENTS = ("started", "begin", "step", "checkpoint", "finished")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=40, help="jobs in the queue")
    args = parser.parse_args()
    with own_daemon("demo=builtin:demo") as client:
        spec = spec_class("grpo").parse(OPTIONS)
        run(client, [client.jobs.submit(spec) for _ in range(3)])  # what only the first ones pay
        jobs = [client.jobs.submit(spec) for _ in range(args.jobs)]
        report(run(client, jobs))


def run(client: Client, jobs: list[str]) -> list[dict[str, float]]:
    """Wait for the jobs; return the moments of each, in unix seconds."""
    found = []
    for job_id in jobs:
        for _ in client.jobs.follow(job_id):
            pass  # until it has ended
        while (ended := client.jobs.get(job_id)["ended_at"]) is None:
            time.sleep(0.01)
        times: dict[str, Any] = {
            event["type"]: event["time"] for event in events.read(client.rundir(job_id).events)
        }
        found.append({**{name: times[name] for name in MOMENTS}, "ended": ended})
    return found


def report(jobs: list[dict[str, float]]) -> None:
    """Print a row per part of a job, and how many jobs end in a second."""
    order = [*MOMENTS, "ended"]
    for first, second in itertools.pairwise(order):
        print_row(f"{first} to {second}", [job[second] - job[first] for job in jobs])
    pairs = list(itertools.pairwise(jobs))
    print_row("ended to started, the next one", [b["started"] - a["ended"] for a, b in pairs])
    seconds = jobs[-1]["ended"] - jobs[0]["ended"]
    click.echo(f"{len(pairs) / seconds:.2f} jobs per second")


def print_row(name: str, seconds: list[float]) -> None:
    click.echo(f"{name:32} {1000 * statistics.median(seconds):7.1f} ms")


if __name__ == "__main__":
    main()
