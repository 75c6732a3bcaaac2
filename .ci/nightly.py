#!/usr/bin/env python3
"""Runs the parts of `make test-nightly`, and remembers for which sources each of them has passed.

    .ci/nightly.py                      every part
    .ci/nightly.py storms ends          these parts
    .ci/nightly.py --changed            parts whose sources changed since they passed (CI);
                                        all of them if CI_FULL is set
    .ci/nightly.py --list               the parts, what they cover, and whether they are up to date

A part is all tests marked `nightly(part=NAME, catches=FAULT)`, or a command of its own; FAULT is
what no test of every change would find. When a part passes, the digest of each file or folder that
it covers, and that of its own tests, goes into `.ci/nightly.json`, which is committed with the
change: CI then need not run the part again. Run it with the Python that has the tests' packages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import psutil

ROOT = Path(__file__).resolve().parents[1]
PASSED = ROOT / ".ci" / "nightly.json"  # by part: date, seconds, processor, digests
LIMIT_S = 40 * 60  # for one part
TESTS = "its tests"  # all files with tests of a part, in the list of what it covers
# The variable that marks all processes of a part, including those in sessions of their own.
RUN = "WARMD_NIGHTLY_RUN"
_MARK = re.compile(r'nightly\(\s*part="(?P<part>\w+)",\s*catches="(?P<catches>[^"]+)",?\s*\)')


@dataclass(frozen=True)
class Part:
    """Tests that run together. Their own files are covered in addition to `sources`."""

    says: str
    sources: tuple[str, ...]
    command: tuple[str, ...] = ()  # instead of the tests marked with the part's name
    processes: int = 3


# What clients of the HTTP API use of the gateway: not the files of the page.
_HTTP_API = (
    *("daemon/gateway/__main__.py", "daemon/gateway/app.py", "daemon/gateway/api"),
    *("daemon/gateway/core", "daemon/gateway/http"),
)

PARTS = {
    "storms": Part(
        "processes killed at random under load, for minutes",
        ("daemon", "jobs/files", "jobs/training", "jobs/grpo", "jobs/context.py"),
        processes=2,
    ),
    "power": Part(
        "power failures at many moments of each kind of job, and of submit",
        (
            *("daemon/lifecycle", "daemon/queue", "daemon/runs", "daemon/work"),
            *("jobs/files", "jobs/training"),
        ),
    ),
    "shortages": Part(
        "machines without space, files, processes or descriptors",
        ("daemon/fork", "daemon/queue", "daemon/supervise", "daemon/work", "jobs/files"),
    ),
    "networks": Part(
        "several machines, also in network namespaces: cut off, slow, with clocks that are off",
        (
            *("daemon/client", "daemon/host", "daemon/lifecycle", "daemon/queue"),
            *("daemon/store", "daemon/supervise", "daemon/work"),
            *("daemon/fork/rank_processes.py", "daemon/fork/rendezvous.py"),
            *("jobs/training/gloo_group.py", "jobs/training/rank_proofs.py"),
        ),
        processes=1,  # a test starts up to four nodes: their imports take all processors
    ),
    "slurm": Part("a real Slurm", ("deploy/slurm", "daemon/host/home.py", "daemon/supervise")),
    "levels": Part(
        "kernels at each instruction set of this processor, and the GPU checks without a GPU",
        ("jobs/compute", "tests/gpu/check.py", "tests/gpu/checks"),
    ),
    "homes": Part(
        "homes of earlier versions, damaged homes",
        ("configs", "daemon", "jobs/files", "jobs/training", "jobs/grpo", "jobs/spec.py"),
    ),
    "oracles": Part(
        "wide comparisons with the stock libraries, benchmarks of every work",
        ("jobs", "constraints.txt"),
    ),
    "clients": Part(
        "hostile and foreign clients of the gateway",
        ("cli/mcp", *_HTTP_API, "jobs/encode", "jobs/engine", "jobs/infer"),
        processes=1,  # they measure how late the gateway answers
    ),
    "callers": Part(
        "clients of the API, with the tools that a model calls because a job trained it to",
        (*_HTTP_API, "jobs/infer", "jobs/sft"),
        processes=1,  # they share the model, whose training takes all processors
    ),
    "page": Part(
        "what people do on the page, in a real browser",
        ("daemon/gateway", "daemon/groups", "daemon/lifecycle"),
    ),
    "episodes": Part(
        "episodes of environments and agents: kills, concurrency, wide options",
        ("jobs/engine", "jobs/environments", "jobs/eval", "jobs/grpo"),
    ),
    "daemons": Part(
        "daemons that start, end, restart and are killed, one process at a time",
        (
            *("daemon/fork", "daemon/host", "daemon/notify"),
            *("daemon/supervise", "daemon/work"),
        ),
    ),
    "ends": Part(
        "lowest and newest versions of every dependency",
        ("pyproject.toml", "constraints.txt", ".ci/constraints-lowest.txt"),
        ("make", "test-lowest", "test-newest"),
    ),
}


class Signals:
    """Handlers of the signals that end the script: they kill the running part and start no other.

    A handler raises no exception: one that interrupts Popen would lose the process id of the part
    that it has just started, which could not be killed then.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._part: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup leaves SIGHUP
                signal.signal(number, self._receive)

    def wait(self, part: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a part. Raises TimeoutExpired and, at a signal, SystemExit."""
        self._part = part
        if self.received is not None:  # while the part was started
            os.killpg(part.pid, signal.SIGKILL)
        code = part.wait(LIMIT_S)
        self.check()
        return code

    def check(self) -> None:
        """Raise SystemExit if a signal was received."""
        if self.received is not None:
            sys.exit(128 + self.received)

    def _receive(self, number: int, _: object) -> None:
        self.received = number
        if self._part is not None and self._part.returncode is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._part.pid, signal.SIGKILL)


def main() -> int:
    """Run the requested parts; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--changed", action="store_true", help="only parts that are not up to date")
    parser.add_argument("--list", action="store_true", help="run nothing")
    args = parser.parse_args()
    for name in args.parts:
        if name not in PARTS:
            parser.error(f"PART: must be of {', '.join(PARTS)}, got {name}")
    signals = Signals()
    passed = _passed()
    rows = []
    for name in args.parts or PARTS:
        changed = [
            path for path, digest in _digests(name).items() if _known(passed, name, path) != digest
        ]
        if args.list or (args.changed and not changed and not os.environ.get("CI_FULL")):
            rows.append((name, "changed: " + ", ".join(changed) if changed else "up to date", 0.0))
            if args.list:
                _print_tests(name)
            continue
        click.echo(f"== {name}: {PARTS[name].says}")
        click.echo(f"   because of: {', '.join(changed) or 'asked for'}")
        rows.append((name, *_run(name, signals)))
    _print_table(rows, _passed())
    return 0 if args.list or all(result in ("passed", "up to date") for _, result, _ in rows) else 1


def _run(name: str, signals: Signals) -> tuple[str, float]:
    """Run a part; return how it ended and its duration in seconds. Raises SystemExit."""
    part, before, begun = PARTS[name], _digests(name), time.monotonic()
    command = part.command or (
        *(sys.executable, "-m", "pytest", "-n", str(part.processes), "--dist", "loadfile"),
        *("--no-loadscope-reorder", "-m", f"nightly(part='{name}')", *_test_files(name)),
    )
    signals.check()
    run = uuid.uuid4().hex
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, RUN: run}, start_new_session=True
    )
    try:
        code = signals.wait(process)
        result = "passed" if code == 0 else f"failed: exit code {code}"
    except subprocess.TimeoutExpired:
        result = f"failed: not done after {LIMIT_S // 60} minutes"
        _kill(run)
        process.wait()
    except SystemExit:
        _kill(run)
        raise
    seconds = time.monotonic() - begun
    if result == "passed":
        entry = {
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(seconds),
            "processor": _processor(),
            "digests": before,  # a file that changed while the tests ran is not covered
        }
        written = PASSED.with_suffix(".tmp")
        written.write_text(json.dumps({**_passed(), name: entry}, indent=1, sort_keys=True) + "\n")
        written.replace(PASSED)
    return result, seconds


def _kill(run: str) -> None:
    """Kill all processes of a part, and those that they start meanwhile."""
    while found := [process for process in psutil.process_iter() if _is_of(process, run)]:
        # Some change their title, which overwrites their environment: they are found as children.
        for process in [*found, *(child for one in found for child in _children(one))]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(found, timeout=1)


def _is_of(process: psutil.Process, run: str) -> bool:
    with suppress(psutil.Error):
        return process.environ().get(RUN) == run
    return False


def _children(process: psutil.Process) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return process.children(recursive=True)
    return []


def _test_files(name: str) -> list[str]:
    """Return the files with tests of a part, relative to the root."""
    paths = [path for path in _files("tests") if path.endswith(".py")]
    return [path for path in paths if any(mark[0] == name for mark in _marks(path))]


def _marks(path: str) -> list[tuple[str, str, str]]:
    """Return part, test and what only it catches, for each nightly mark of a file."""
    marks = []
    for found in _MARK.finditer((ROOT / path).read_text()):
        test = re.search(r"^def (test_\w+)", found.string[found.end() :], re.MULTILINE)
        # `@pytest.mark.nightly` marks a test; without the @ it is a value that the file uses.
        is_for_file = not found.string[: found.start()].endswith("@pytest.mark.")
        name = path if is_for_file or test is None else f"{path}::{test[1]}"
        marks.append((found["part"], name, found["catches"]))
    return marks


def _digests(name: str) -> dict[str, str]:
    """Return the digest of the content of each file or folder that a part covers."""
    found = {path: _digest(_files(path)) for path in PARTS[name].sources}
    return {**found, TESTS: _digest(_test_files(name))}


def _digest(files: Iterable[str]) -> str:
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file}\0".encode() + hashlib.sha256((ROOT / file).read_bytes()).digest())
    return whole.hexdigest()[:16]


def _files(path: str) -> list[str]:
    """Return the files below a path that are tracked or could be, sorted."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", path],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return sorted(file for file in listed.stdout.split("\0") if file and (ROOT / file).is_file())


def _passed() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PASSED.read_text()) if PASSED.exists() else {}
    return found


def _known(passed: dict[str, Any], name: str, path: str) -> str | None:
    found: str | None = passed.get(name, {}).get("digests", {}).get(path)
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    model = next((x.partition(": ")[2] for x in lines if x.startswith("model name")), "")
    return f"{model or platform.machine()}, {os.cpu_count()} cores"


def _print_tests(name: str) -> None:
    click.echo(f"{name}: {PARTS[name].says}")
    for path in _test_files(name):
        for part, test, catches in _marks(path):
            if part == name:
                click.echo(f"    {test}\n        only here: {catches}")


def _print_table(rows: list[tuple[str, str, float]], passed: dict[str, Any]) -> None:
    click.echo(f"\n{'PART':<10} {'SECONDS':>7}  {'LAST PASSED':<11} RESULT")
    for name, result, seconds in rows:
        date = passed.get(name, {}).get("date", "-")
        click.echo(f"{name:<10} {seconds:>7.0f}  {date:<11} {result}")


if __name__ == "__main__":
    sys.exit(main())
