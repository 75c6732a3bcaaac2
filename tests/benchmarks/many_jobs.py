#!/usr/bin/env python3
"""The cost of reads with few and with many ended jobs.

    python tests/benchmarks/many_jobs.py [--ended 10 10000]

The jobs are made through the job store, not run. Times are of one process, the best of several
calls, with the command line's own start left out; next to them the commands that Redis ran.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from ended_jobs import end, reads
from gateways import Gateway

from warmd.cli.main import main as warmd
from warmd.jobs import spec_class

CALLS = 25


def typed(home: Gateway, *arguments: str) -> Callable[[], object]:
    """A command as it is typed, in this process."""

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            assert warmd(["--home", str(home.home.path), *arguments]) == 0

    return run


def measure(home: Gateway, read: Callable[[], object]) -> tuple[float, int]:
    """The least seconds of a read, and the commands that Redis runs for one."""

    def commands() -> int:
        info: Any = home.client.connection.info("stats")
        return int(info["total_commands_processed"])

    read()  # measured once
    before = commands()
    read()
    number = commands() - before - 1
    seconds = []
    for _ in range(CALLS):
        begun = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - begun)
    return min(seconds), number


def fetched(home: Gateway, path: str) -> Callable[[], object]:
    """A request to the gateway."""

    def get() -> None:
        with urllib.request.urlopen(f"{home.url}{path}") as response:
            response.read()

    return get


def prepared(folder: Path) -> Gateway:
    """A home with a gateway, a job that runs and one that waits."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 256}')
    home = Gateway(folder / "home", model)
    for _ in range(2):
        spec = spec_class("grpo").parse({"model": "tiny", "samples": 4, "num_generations": 2})
        home.client.submit(spec)
    popped: Any = home.client.connection.blpop(["rq:queue:train"], 5)
    home.client.store.begin(popped[1], "train", "train-0:test:1")
    return home


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ended", type=int, nargs="+", default=[10, 10_000])
    numbers = parser.parse_args().ended
    found: dict[str, list[tuple[float, int]]] = {}
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        home = prepared(Path(folder))
        made = 0
        for number in numbers:
            end(home.client, number - made)
            made = number
            every = {
                **reads(home),
                "warmd queue": typed(home, "queue"),
                "warmd show": typed(home, "show"),
                "warmd jobs --limit 20": typed(home, "jobs", "--limit", "20"),
            }
            for path in ("/metrics", "/v1/models", "/v1/fine_tuning/jobs"):
                every[f"GET {path}"] = fetched(home, path)
            for name, read in every.items():
                found.setdefault(name, []).append(measure(home, read))
        home.close()
    heads = "".join(f"{f'{n} ended':>24}" for n in numbers)
    lines = [f"{'':<24}{heads}{'ratio':>8}"]
    for name, costs in found.items():
        cells = "".join(f"{s * 1e3:>11.2f} ms {n:>5} cmds" for s, n in costs)
        lines.append(f"{name:<24}{cells}{costs[-1][0] / costs[0][0]:>8.2f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
