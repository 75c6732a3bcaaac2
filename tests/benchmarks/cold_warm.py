"""Shared by benchmarks of cold scripts and warm jobs: a run of each side, and the medians."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
OFFLINE = {**os.environ, "HF_HUB_OFFLINE": "1"}

Seconds = dict[str, float]  # of a run's parts, and in all as "total"


def cold(script: str, *words: object) -> Seconds:
    """Run a script of this folder, which prints the seconds of its parts in its last line."""
    command = [sys.executable, str(HERE / script), *map(str, words)]
    begun = time.perf_counter()
    done = subprocess.run(command, env=OFFLINE, capture_output=True, text=True, check=True)
    total = time.perf_counter() - begun
    parts: Seconds = json.loads(done.stderr.strip().splitlines()[-1])
    return {**parts, "total": total}


def submitted(home: Path, *words: object) -> tuple[list[dict[str, Any]], float]:
    """Submit a job and wait for its end; return its events and the seconds that it took in all."""
    command = [sys.executable, "-m", "warmd.cli", "--home", str(home), "submit", *map(str, words)]
    begun = time.perf_counter()
    done = subprocess.run(
        [*command, "--wait", "--json"], capture_output=True, text=True, check=True
    )
    total = time.perf_counter() - begun
    return [event for event in map(json.loads, done.stdout.splitlines()) if "seq" in event], total


def print_medians(pairs: list[tuple[Seconds, Seconds]], *, as_json: bool, digits: int) -> None:
    """Print the medians of the parts of each side, and of the ratio of the pairs."""
    medians = {
        name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        for name, runs in zip(("cold", "warm"), zip(*pairs, strict=True), strict=True)
    }
    ratio = statistics.median(c["total"] / w["total"] for c, w in pairs)
    if as_json:
        sys.stdout.write(json.dumps({**medians, "ratio": ratio}) + "\n")
        return
    for name, parts in medians.items():
        row = "  ".join(f"{key} {value:.{digits}f}" for key, value in parts.items())
        sys.stdout.write(f"{name}  {row}\n")
    sys.stdout.write(f"cold / warm: {ratio:.1f}\n")
