"""Checks everything that warmd documents for GPUs, by one command within ten minutes.

    .venv/bin/python tests/gpu/check.py [--only fork,attention] [--limit 560] [--json FILE]

Each check is a module in `checks/` and runs in a process of its own, with a limit of its own: one
that hangs or loses its CUDA context takes no other with it. A check reports facts; each is printed
at once, next to the expected value. At the end there are a table and a JSON file with all facts.
The exit code is 1 if a fact is not as expected or a check did not end.

Without a GPU the parts that need one are reported as skipped, and the others run on the CPU with
tiny models: CI does that.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

HERE = Path(__file__).parent
LIMITS_S = {  # in the order in which they run
    "environment": 40,
    "fork": 60,
    "attention": 60,
    "graphs": 60,
    "memory": 60,
    "equality": 80,
    "determinism": 80,
    "sticky": 40,
    "recovery": 130,
    "kinds": 150,
    "benchmarks": 200,
}
_WORDS = {True: "ok", False: "BAD", None: "info"}

Fact = dict[str, Any]  # check, name, found, expected, ok


def main() -> int:
    """Run the requested checks; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default=",".join(LIMITS_S), help="checks, with commas between")
    parser.add_argument("--limit", type=float, default=560, help="seconds for all checks")
    parser.add_argument("--json", type=Path, default=Path("gpu-check.json"), help="file of facts")
    args = parser.parse_args()
    names = args.only.split(",")
    for name in names:
        if name not in LIMITS_S:
            parser.error(f"--only: must be of {', '.join(LIMITS_S)}, got {name}")
    ends_at = time.monotonic() + args.limit
    facts: list[Fact] = []
    summary = []
    for name in names:
        begun = time.monotonic()
        found = list(_run(name, min(LIMITS_S[name], ends_at - begun)))
        facts += found
        summary.append((name, time.monotonic() - begun, found))
        args.json.write_text(json.dumps(facts, indent=1))
    _print_table(summary)
    click.echo(f"all facts: {args.json}")
    return 1 if any(fact["ok"] is False for fact in facts) else 0


def _run(name: str, limit_s: float) -> Iterator[Fact]:
    """Run one check; print and yield its facts, the last of them how it ended if not well."""
    click.echo(f"== {name}")
    if limit_s <= 0:
        yield _shown(_fact(name, "started", "no time left", "--limit", None))
        return
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", f"checks.{name}"],
        env={**os.environ, "PYTHONPATH": _python_path(), "HF_HUB_OFFLINE": "1"},
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
        end = None if process.returncode == 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        end = f"killed after {limit_s:.0f} s"
    rest = []
    for line in output.splitlines():
        if line.startswith('{"fact"'):
            fact = json.loads(line)
            yield _shown(_fact(name, fact["fact"], fact["found"], fact["expected"], fact["ok"]))
        else:
            rest.append(line)
    if end is not None:
        yield _shown(_fact(name, "ended", end, "exit code 0", False))
        click.echo("\n".join(f"     | {line}" for line in rest[-15:]))


def _python_path() -> str:
    return os.pathsep.join(map(str, (HERE, HERE.parent / "support", HERE.parent / "benchmarks")))


def _fact(check: str, name: str, found: Any, expected: str, ok: bool | None) -> Fact:
    return {"check": check, "name": name, "found": found, "expected": expected, "ok": ok}


def _shown(fact: Fact) -> Fact:
    found = fact["found"]
    text = f"{found:.4g}" if isinstance(found, float) else str(found)
    expected = f"  (expected: {fact['expected']})" if fact["expected"] else ""
    click.echo(f"{_WORDS[fact['ok']]:<4} {fact['name']}: {text}{expected}")
    return fact


def _print_table(summary: list[tuple[str, float, list[Fact]]]) -> None:
    click.echo(f"\n{'CHECK':<12} {'SECONDS':>7} {'OK':>4} {'BAD':>4} {'INFO':>4}")
    for name, seconds, facts in summary:
        counts = [sum(fact["ok"] is ok for fact in facts) for ok in (True, False, None)]
        click.echo(f"{name:<12} {seconds:>7.1f} {counts[0]:>4} {counts[1]:>4} {counts[2]:>4}")


if __name__ == "__main__":
    sys.exit(main())
