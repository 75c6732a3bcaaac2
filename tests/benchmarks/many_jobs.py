#!/usr/bin/env python3
"""The cost of reads with few and with many ended and waiting jobs.

    python tests/benchmarks/many_jobs.py [--many 10000]

Half of the ended jobs are answers, half trainings that have failed; of the waiting ones, half are
requests of HTTP clients, half trainings. They are made through the job store, not run. Times are of
one process, the best of several calls, without the start of the command line; next to them the
commands that Redis ran. `queue` lists every waiting job, so its cost grows with these.
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

from ended_jobs import end, reads, wait
from gateways import Gateway

from warmd.cli.main import main as warmd
from warmd.jobs import spec_class

CALLS = 25
FEW = 10
LONGEST_S = 5.0  # of the calls of one read
SETTLED_S = 1.1  # for so long after a submission every read looks at the run directories


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
    seconds: list[float] = []
    while len(seconds) < CALLS and sum(seconds) < LONGEST_S:
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
        home.client.jobs.submit(spec)
    popped: Any = home.client.connection.blpop(["rq:queue:train"], 5)
    home.client.store.begin(popped[1], "train", "train-0:test:1")
    return home


def every_read(home: Gateway) -> dict[str, Callable[[], object]]:
    """Everything that reads jobs: in this process, as typed, and over HTTP."""
    paths = ("/metrics", "/v1/models", "/v1/fine_tuning/jobs")
    return {
        **reads(home),
        "warmd queue": typed(home, "queue"),
        "warmd show": typed(home, "show"),
        "warmd jobs --limit 20": typed(home, "jobs", "--limit", "20"),
        **{f"GET {path}": fetched(home, path) for path in paths},
    }


def add(home: Gateway, make: Callable[..., object], number: int) -> float:
    """Make so many jobs, half of each queue; return the seconds that it took."""
    begun = time.perf_counter()
    make(home.client, number // 2)
    make(home.client, number - number // 2, "grpo")
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--many", type=int, default=10_000)
    many = parser.parse_args().many
    found: dict[str, list[tuple[float, int]]] = {}
    stages = (
        (f"{FEW} ended", [(end, FEW), (wait, FEW)]),
        (f"{many} ended", [(end, many - FEW)]),
        (f"and {many} waiting", [(wait, many - FEW)]),
    )
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        home = prepared(Path(folder))
        for name, parts in stages:
            took_s = sum(add(home, make, number) for make, number in parts)
            sys.stderr.write(f"{name}: made in {took_s:.0f} s\n")
            time.sleep(SETTLED_S)
            for read_name, read in every_read(home).items():
                found.setdefault(read_name, []).append(measure(home, read))
        home.close()
    heads = "".join(f"{name:>24}" + f"{'ratio':>7}" * bool(n) for n, (name, _) in enumerate(stages))
    lines = [f"{'':<24}{heads}"]
    for name, costs in found.items():
        cells = ""
        for n, (seconds, commands) in enumerate(costs):
            cells += f"{seconds * 1e3:>11.2f} ms {commands:>5} cmds"
            cells += f"{seconds / costs[0][0]:>7.2f}" * bool(n)
        lines.append(f"{name:<24}{cells}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
