"""The same job twice: uninterrupted, and with its work horse killed at random times.

    python tests/benchmarks/endurance.py --kills 10 -- mlm --steps 300 --save-every 10 ...
    python tests/benchmarks/endurance.py --kills 10 --load tiny=FOLDER -- grpo --model tiny ...

The arguments after `--` are those of `warmd submit`. Starts its own daemon. Exits with 1 unless
both end with the same bits, each step is logged once, and no kill costs more than the steps since
the last committed checkpoint and the one in progress. With `--save-every` in minutes the runs save
at different steps: the checkpoints that both have are compared, including the last one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import orjson
from own_daemon import own_daemon
from safetensors import safe_open

from warmd.daemon.runs import events
from warmd.jobs.training.options import SaveInterval


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--load", metavar="NAME=FOLDER", action="append", default=[], help="a model to make warm"
    )
    parser.add_argument("words", nargs="+", help="of warmd submit")
    options = parser.parse_args()
    with own_daemon(*options.load) as client:
        warmd = Warmd(client.config.home)
        return compare(warmd, options.words, options.kills, random.Random(options.seed))


class Warmd:
    """The jobs of one home, submitted by the command line."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def submit(self, *words: str) -> str:
        command = [sys.executable, "-m", "warmd.cli", "--home", str(self.home), "submit", *words]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def events(self, job: str) -> list[dict[str, Any]]:
        return list(events.read(self.home / "runs" / job / "events.jsonl"))

    def await_end(self, job: str) -> float:
        while not (found := [e for e in self.events(job) if e["type"] in events.TERMINAL]):
            time.sleep(0.1)
        if found[-1]["type"] != "finished":
            sys.exit(f"{job} {found[-1]['type']}: {found[-1].get('error')}")
        seconds: float = found[-1]["time"] - self.events(job)[0]["time"]
        return seconds

    def save_every(self, job: str) -> SaveInterval:
        document = orjson.loads((self.home / "runs" / job / "spec.json").read_bytes())
        return SaveInterval.parse(document["spec"]["save_every"])


def compare(warmd: Warmd, words: list[str], kills: int, generator: random.Random) -> int:
    straight = warmd.submit(*words)
    took_s = warmd.await_end(straight)
    click.echo(f"straight: {straight}, {took_s:.1f} s")
    steps = len([event for event in warmd.events(straight) if event["type"] == "step"])
    step_s = took_s / steps
    killed = warmd.submit(*words)
    done = kill_at(warmd, killed, sorted(generator.uniform(0, steps) for _ in range(kills)), step_s)
    killed_s = warmd.await_end(killed)
    click.echo(f"killed {done} times: {killed}, {killed_s:.1f} s")
    problems = [] if done == kills else [f"only {done} kills found the job running"]
    problems += differences(warmd, straight, killed) + repeats(warmd, killed)
    for problem in problems:
        click.echo(f"PROBLEM: {problem}")
    return 1 if problems else 0


def kill_at(warmd: Warmd, job: str, instants: list[float], step_s: float) -> int:
    """Kill the horse at each instant, counted in steps; return how often.

    12.4 is two fifths of a step after the end of step 12, or as soon as there is a horse again.
    """
    done, pid = 0, None
    while instants:
        logged = warmd.events(job)
        if logged and logged[-1]["type"] in events.TERMINAL:
            break
        starts = [event for event in logged if event["type"] == "started"]
        last = max((event["step"] for event in logged if event["type"] == "step"), default=0)
        if starts and starts[-1]["pid"] != pid and last >= int(instants[0]):
            time.sleep(instants[0] % 1 * step_s)
            pid = starts[-1]["pid"]
            os.kill(pid, signal.SIGKILL)
            instants.pop(0)
            done += 1
        time.sleep(0.01)
    return done


def differences(warmd: Warmd, one: str, other: str) -> list[str]:
    """The differences between two finished jobs, compared bit for bit."""
    found = []
    for part in ("model", "checkpoints"):
        files = {job: bits_of(warmd.home / "runs" / job / part) for job in (one, other)}
        if part == "checkpoints" and warmd.save_every(one).steps is None:
            folders = [{Path(name).parts[0] for name in bits} for bits in files.values()]
            both = set.intersection(*folders)
            files = {
                job: {name: digest for name, digest in bits.items() if Path(name).parts[0] in both}
                for job, bits in files.items()
            }
            last = f"checkpoint-{max(e['step'] for e in warmd.events(one) if e['type'] == 'step')}"
            found += [] if last in both else [f"{last} is not in both"]
        if files[one].keys() != files[other].keys():
            found.append(f"{part}: other files: {files[one].keys() ^ files[other].keys()}")
        for name, digest in files[one].items():
            same = digest == files[other].get(name)
            click.echo(f"  {part}/{name}: {digest[:16]} {'same' if same else 'DIFFERENT'}")
            if not same:
                found.append(f"{part}/{name} differs")
    steps = [
        {e["step"]: plain(e) for e in warmd.events(job) if e["type"] == "step"}
        for job in (one, other)
    ]
    unlike = [n for n in steps[0] if steps[0][n] != steps[1].get(n)]
    click.echo(f"  {len(steps[0])} step events, {len(unlike)} of them different")
    return found + ([f"the events of steps {unlike[:5]} differ"] if unlike else [])


def bits_of(folder: Path) -> dict[str, str]:
    """A digest of every file with state; of the tensors if the file contains times."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            digest = hashlib.sha256()
            with safe_open(path, "np") as tensors:
                for key in sorted(tensors.keys()):
                    digest.update(key.encode() + tensors.get_tensor(key).tobytes())
            found[name] = digest.hexdigest()
        elif path.name in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def plain(event: dict[str, Any]) -> dict[str, Any]:
    """An event without the fields that depend on the clock and the execution."""
    clock = ("seq", "execution", "time", "seconds", "generation_s", "training_s")
    return {name: value for name, value in event.items() if name not in clock}


def repeats(warmd: Warmd, job: str) -> list[str]:
    """Steps that were reported twice, and kills that cost more steps than allowed.

    A kill costs the steps since the last checkpoint; one that was still being written when it came
    does not count, as it would not count when the power failed. One that was logged does.
    """
    logged = warmd.events(job)
    steps = [event["step"] for event in logged if event["type"] == "step"]
    found = [] if steps == list(range(1, len(steps) + 1)) else ["a step is not logged exactly once"]
    interval = warmd.save_every(job)
    every = interval.steps  # None: it is up to the clock, at which steps
    lost, in_flight, last, durable = [], 0, 0, 0
    for event in logged:
        if event["type"] == "step":
            last = event["step"]
        elif event["type"] == "checkpoint":
            durable = event["step"]
        elif event["type"] == "begin" and event["execution"] > 1:
            resumed = event["resumed_from"] or 0
            lost.append(last - resumed)
            if every is not None and lost[-1] > every:
                in_flight += 1
            least = durable if every is None else max(durable, (last // every - 1) * every)
            if resumed < least:
                found.append(f"killed after step {last}, resumed from {resumed}")
    saved = f"{interval.seconds} s" if every is None else f"{every}; {in_flight} saves in flight"
    click.echo(f"  steps computed again: {lost}; saved every {saved}")
    return found


if __name__ == "__main__":
    sys.exit(main())
