"""Kill a daemon's processes at random while it works, then check that nothing was lost.

    unshare --pid --fork --mount-proc \\
        python tests/support/random_storm.py --seconds 600 --jobs 100 --seed 1

Every process of the daemon is a victim: guardian, supervisor, Redis, zygote, workers, horses and
the gateway, by signals that end it, and by SIGSTOP with SIGCONT or SIGKILL some seconds later. Jobs
are submitted meanwhile. Afterwards every job has to finish, with each step and each answer once. It
is the first process of a PID namespace, so it cannot hit a process that is not its own.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import orjson
import psutil
import tiny
from daemons import Daemon, gone

from warmd.configs.config import WorkerConfig
from warmd.daemon.runs import events
from warmd.jobs import spec_class
from warmd.jobs.errors import WarmdError

log = logging.getLogger("storm")

STEPS, ROWS = 12, 40
CALM_S = 120.0  # for the next one of what is left to finish
PAUSE_S = (0.5, 3.0)  # between two blows
STOPPED_S = (1.0, 12.0)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGSEGV)
WORKERS = (
    WorkerConfig(name="train-0", queue="train", threads=1),
    WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=8, threads=1),
)


class Storm:
    """One daemon, its jobs, and what hits it."""

    def __init__(self, folder: Path, *, seed: int, jobs: int) -> None:
        model = folder / "tiny"
        tiny.model().save_pretrained(model)
        tiny.tokenizer().save_pretrained(model)
        self.daemon = Daemon(folder / "d" / "home", model, workers=WORKERS, http_port=0)
        self.jobs: list[str] = []
        self.signals = 0  # sent so far
        self._folder = folder
        self._random = random.Random(seed)
        self._wanted = jobs
        self._stopped: list[tuple[float, psutil.Process, signal.Signals]] = []
        self._rows = folder / "rows.jsonl"
        rows = [{"prompt": f"{n} and {n}"} for n in range(ROWS)]
        self._rows.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))

    def rage(self, seconds: float) -> None:
        """Submit and strike until the time is over, and all jobs are submitted."""
        self.daemon.start()
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(self.jobs) < self._wanted:
            self._submit_some(end - time.monotonic())
            time.sleep(self._random.uniform(*PAUSE_S))
            self._let_go(time.monotonic())
            if time.monotonic() < end:
                self._strike()
        self._let_go(float("inf"))

    def calm(self) -> None:
        """Wait until every job has ended, however many are left."""
        left = self.jobs
        deadline = time.monotonic() + CALM_S
        while still := [job_id for job_id in left if not self._has_ended(job_id)]:
            if len(still) < len(left):
                left, deadline = still, time.monotonic() + CALM_S
            if time.monotonic() > deadline:
                raise AssertionError(f"none of these ended in {CALM_S:.0f} s: {left}")
            self._start_if_gone()
            time.sleep(0.5)

    def _has_ended(self, job_id: str) -> bool:
        with contextlib.suppress(WarmdError):  # Redis may be away for a moment
            return self.daemon.client.job(job_id)["status"] in ("finished", "failed", "stopped")
        return False

    def _submit_some(self, seconds_left: float) -> None:
        """As many jobs as the remaining time allows, of three kinds alternately."""
        while len(self.jobs) < self._wanted and self._random.random() < 0.7:
            try:
                self.jobs.append(self._submit(len(self.jobs)))
            except WarmdError as error:  # the daemon is restarting
                log.info("submit: %s", error)
                return
            if seconds_left > 0 and self._random.random() < 0.5:
                return

    def _submit(self, number: int) -> str:
        if number % 2 == 0:
            every = 1 + number % 6
            return self.daemon.submit(samples=STEPS, save_every=every, retries=9, seed=number)
        values = {"model": "tiny", "max_tokens": 12, "seed": number}
        if number % 4 == 1:
            output = self._folder / f"out-{number}.jsonl"
            values |= {"input": str(self._rows), "output": str(output)}
        else:
            values |= {"prompt": "1 and 2", "n": 4}
        return self.daemon.client.submit(spec_class("infer").parse(values), retries=9)

    # --- blows --------------------------------------------------------------------------------

    def _strike(self) -> None:
        if not self._start_if_gone():
            return
        victims = list(processes())
        weights = [*map(weight, victims)]
        if not any(weights):  # the last ones are just ending
            return
        (victim,) = self._random.choices(victims, weights)
        how = self._random.random()
        with contextlib.suppress(psutil.NoSuchProcess):
            if how < 0.15:
                until = time.monotonic() + self._random.uniform(*STOPPED_S)
                then = self._random.choice((signal.SIGCONT, signal.SIGCONT, signal.SIGKILL))
                self._stopped.append((until, victim, then))
                self._send(victim, signal.SIGSTOP)
            else:
                self._send(victim, signal.SIGKILL if how < 0.7 else self._random.choice(ENDING))

    def _send(self, victim: psutil.Process, blow: signal.Signals) -> None:
        log.info("%s %d %s", blow.name, victim.pid, " ".join(command_line(victim)[1:4]))
        victim.send_signal(blow)
        self.signals += 1

    def _let_go(self, now: float) -> None:
        for item in [item for item in self._stopped if item[0] <= now]:
            self._stopped.remove(item)
            with contextlib.suppress(psutil.NoSuchProcess):
                self._send(item[1], item[2])

    def _start_if_gone(self) -> bool:
        """Start the daemon where guardian and supervisor were both hit; whether it runs."""
        if self.daemon.home.is_locked():
            return True
        if not any("warmd.daemon" in command_line(process) for process in processes()):
            log.info("start")
            with contextlib.suppress(WarmdError):
                self.daemon.start()
        return False

    # --- what must hold -----------------------------------------------------------------------

    def check(self) -> Iterator[str]:
        """Yield what is wrong."""
        for number, job_id in enumerate(self.jobs):
            for problem in self._problems(number, job_id):
                yield f"{job_id}: {problem}"
        self.daemon.stop()
        deadline = time.monotonic() + 20
        while (left := list(processes())) and time.monotonic() < deadline:
            time.sleep(0.2)
        yield from (f"left behind: {command_line(process)}" for process in left)

    def _problems(self, number: int, job_id: str) -> Iterator[str]:
        job = self.daemon.client.job(job_id)
        if job["status"] != "finished":
            yield f"{job['status']}: {job['error']}"
            return
        rundir = self.daemon.client.rundir(job_id)
        logged = list(events.read(rundir.events))
        if [e["seq"] for e in logged] != list(range(1, len(logged) + 1)):
            yield "events are missing or twice"
        if Counter(e["type"] for e in logged)["finished"] != 1:
            yield "it finished more than once"
        steps = [e["step"] for e in logged if e["type"] == "step"]
        if number % 2 == 0 and steps != list(range(1, STEPS + 1)):
            yield f"steps: {steps}"
        if number % 4 == 1:
            lines = (self._folder / f"out-{number}.jsonl").read_bytes().splitlines()
            rows = [orjson.loads(line)["row"] for line in lines]
            if rows != list(range(1, ROWS + 1)):
                yield f"rows of its output: {rows}"
        for path in rundir.path.rglob(".*"):
            yield f"left behind: {path}"


def processes() -> Iterator[psutil.Process]:
    """All living processes but this one and the first of the namespace."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.pid not in (1, os.getpid()) and not gone(process):
                yield process


def weight(process: psutil.Process) -> float:
    """How often a process is hit: all ends with guardian and supervisor, which takes seconds."""
    words = command_line(process)
    return 0.3 if words[-1:] == ["warmd.daemon"] else float(bool(words))


def command_line(process: psutil.Process) -> list[str]:
    """Return its arguments, the program first; none for a process that has just ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return list(process.cmdline())
    return []


def reap_for(child: int) -> int:
    """Be the first process of the namespace: wait for everybody; return how `child` ended."""
    while True:
        pid, status = os.wait()
        if pid == child:
            return os.waitstatus_to_exitcode(status)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    arguments: Any = parser.parse_args()
    if os.getpid() != 1:
        sys.exit("random_storm: must be the first process of a PID namespace: see --help")
    child = os.fork()
    if child != 0:
        os._exit(reap_for(child) & 0xFF)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        storm = Storm(Path(folder), seed=arguments.seed, jobs=arguments.jobs)
        storm.rage(arguments.seconds)
        log.info("calm after %d signals", storm.signals)
        storm.calm()
        problems = list(storm.check())
    sys.stdout.write("\n".join(problems) or f"nothing lost: {len(storm.jobs)} jobs")
    sys.stdout.flush()
    os._exit(bool(problems))


if __name__ == "__main__":
    main()
