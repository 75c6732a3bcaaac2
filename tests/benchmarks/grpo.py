#!/usr/bin/env python3
"""A GRPO step by TRL and by warmd on the same work, and what the machine permits.

    python tests/benchmarks/grpo.py [WORK ...] [--pairs N] [--steps N] [--threads N] [--json]

Each pair is a process of either side, the second pair in the other order; the first step of a
process is left out. Shown are medians over all steps, and the floor from the rates of matrix
products and memory that were measured beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from warmd.jobs.bench.grpo import WORKS

SIDES = ("trl", "warmd")


def measure(side: str, work: str, *, steps: int, threads: int | None) -> dict[str, Any]:
    """Run one side in a process of its own."""
    environment = dict(os.environ, HF_HUB_OFFLINE="1")
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    child = subprocess.run(
        [sys.executable, "-m", "warmd.jobs.bench.grpo", side, work, str(steps)],
        stdout=subprocess.PIPE,
        env=environment,
        check=True,
    )
    measured: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return measured


def compare(work: str, *, pairs: int, steps: int, threads: int | None) -> dict[str, Any]:
    """Run pairs of both sides and return the medians."""
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for pair in range(pairs):
        for side in SIDES if pair % 2 == 0 else SIDES[::-1]:
            found[side].append(measure(side, work, steps=steps, threads=threads))
    result: dict[str, Any] = {"work": work}
    for side in SIDES:
        result[f"{side}_s"] = statistics.median(s for run in found[side] for s in run["seconds"])
        result[f"{side}_processor_s"] = statistics.median(
            s for run in found[side] for s in run["processor_s"]
        )
        result[f"{side}_private_bytes"] = max(run["private_bytes"] for run in found[side])
        result[f"{side}_resident_bytes"] = max(run["resident_bytes"] for run in found[side])
    result["floor_s"] = min(run["floor_s"] for runs in found.values() for run in runs)
    result["faster"] = result["trl_s"] / result["warmd_s"]
    result["share_of_floor"] = result["floor_s"] / result["warmd_s"]
    return result


def say(line: str) -> None:
    """Write a line to stdout at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Print a line for each work as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    usual = [name for name in WORKS if name != "tiny"]
    parser.add_argument("works", nargs="*", metavar="WORK", default=usual, choices=[*WORKS, usual])
    parser.add_argument("--pairs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="timed in each process")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if not args.json:
        say("work                     TRL s  warmd s  faster  floor s  share  TRL GB  warmd GB")
    for work in args.works:
        row = compare(work, pairs=args.pairs, steps=args.steps, threads=args.threads)
        if args.json:
            say(json.dumps(row))
            continue
        say(
            f"{work:22} {row['trl_s']:7.2f} {row['warmd_s']:8.2f} {row['faster']:6.1f}x "
            f"{row['floor_s']:8.2f} {row['share_of_floor']:6.0%} "
            f"{row['trl_private_bytes'] / 1e9:7.1f} {row['warmd_private_bytes'] / 1e9:9.1f}"
        )


if __name__ == "__main__":
    main()
