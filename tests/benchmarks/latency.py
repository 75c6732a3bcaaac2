#!/usr/bin/env python3
"""From the queue to the first line of `run()`: warmd compared with a stock RQ worker.

    python tests/benchmarks/latency.py MODEL [--jobs 100] [--stock-jobs 5] [--json]

MODEL is a folder, say one with a 0.5B model. A warmd job is timed from `enqueued_at`, which the
client sets before it pushes the job, to the `started` event, which the horse writes right before
it calls `run()`; it is killed there. The first job is submitted once the zygote has moved its
memory into huge pages, which it does within seconds of its start. A stock job imports what a GRPO
job needs and loads the model; its time ends where training could begin. The first stock job is left
out: it waits for the start of its worker, too. Both use the same server.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import cast

import orjson
from own_daemon import kill, own_daemon, submit_until
from rq import Queue

from warmd.daemon.client import control
from warmd.daemon.client.client import Client
from warmd.daemon.host.parent_death import tied_to_parent

HERE = Path(__file__).resolve().parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path, help="model folder to keep warm")
    parser.add_argument("--jobs", type=int, default=100, help="warmd jobs to time")
    parser.add_argument("--stock-jobs", type=int, default=5, help="stock RQ jobs to time")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    args = parser.parse_args()
    with own_daemon(f"model={args.model}") as client:
        while not control.status(client.config)["zygote"]["settled"]:
            time.sleep(0.1)
        figures = {
            "warmd": summary(time_warmd(client, args.jobs)),
            "stock_rq": summary(time_stock(client, args.model.resolve(), args.stock_jobs)),
        }
    if args.json:
        sys.stdout.write(orjson.dumps(figures).decode() + "\n")
        return
    sys.stdout.write(f"{'':10} {'jobs':>5} {'median':>10} {'p95':>10} {'max':>10}\n")
    for name, row in figures.items():
        cells = "".join(f" {row[key]:>7.1f} ms" for key in ("median_ms", "p95_ms", "max_ms"))
        sys.stdout.write(f"{name:10} {row['jobs']:>5}{cells}\n")


def time_warmd(client: Client, jobs: int) -> list[float]:
    """Seconds from enqueueing to `run()`, a job at a time."""
    seconds = []
    for _ in range(jobs):
        job_id, events = submit_until(client, "started", "grpo", model="model")
        seconds.append(events["started"]["queued_s"])
        kill(client, job_id)
    return seconds


def time_stock(client: Client, model: Path, jobs: int) -> list[float]:
    """The same with RQ's worker, which forks before anything is imported."""
    queue = Queue("stock", connection=client.connection)
    worker = subprocess.Popen(
        tied_to_parent(
            [sys.executable, "-m", "rq.cli", "worker", "--quiet", "--url", client.url, "stock"]
        ),
        cwd=HERE,
    )
    seconds = []
    try:
        for _ in range(1 + jobs):
            begun = time.time()
            job = queue.enqueue("stock_job.prepare", str(model))
            while not job.is_finished:
                if job.is_failed:
                    raise RuntimeError(f"the stock job failed: {job.latest_result()}")
                time.sleep(0.01)
            ready: float = cast(float, job.return_value())
            seconds.append(ready - begun)
    finally:
        worker.terminate()
        worker.wait()
    return seconds[1:]


def summary(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "jobs": len(ordered),
        "median_ms": statistics.median(ordered) * 1e3,
        "p95_ms": ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))] * 1e3,
        "max_ms": ordered[-1] * 1e3,
    }


if __name__ == "__main__":
    main()
