"""Hit a daemon at random while it works, then check that nothing was lost.

    unshare --pid --fork --kill-child --mount-proc \\
        python tests/support/random_storm.py --seconds 600 --jobs 100 --seed 1

Every process of the daemon is a victim: guardian, supervisor, Redis, zygote, workers, horses and
the gateway, by signals that end it, and by SIGSTOP with SIGCONT or SIGKILL some seconds later. With
the right to mount, its disk is also filled for some seconds or loses its power, and Redis is set
back to a copy of some seconds before. Jobs are submitted meanwhile. Afterwards every job has to
finish, with each step and each answer once, and a training with the weights of an undisturbed one.
It is the first process of a PID namespace, so it cannot hit a process that is not its own.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import orjson
import psutil
import tiny
from daemons import Daemon, gone
from disturbing import weights
from power import Disk, disk_without_power
from small_disks import fill, make_room
from waiting import wait_until

from warmd.configs.config import WorkerConfig
from warmd.daemon.lifecycle.queueing import Queueing
from warmd.daemon.runs import events
from warmd.jobs import spec_class
from warmd.jobs.errors import WarmdError

log = logging.getLogger("storm")

STEPS, ROWS = 30, 40
VARIANTS = 6  # seeds of the trainings are the even ones below
CALM_S = 120.0  # for the next one of what is left to finish
PAUSE_S = (0.5, 3.0)  # between two blows
STOPPED_S = (1.0, 12.0)
FULL_S = (1.0, 5.0)
DISK_MB = 64
COPIES = 5  # of Redis' data, seconds apart
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGSEGV)
WORKERS = (
    WorkerConfig(name="train-0", queue="train", threads=1),
    WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=8, threads=1),
)


class Storm:
    """One daemon, its jobs, and what hits it."""

    def __init__(self, folder: Path, *, seed: int, jobs: int, disk: Disk | None) -> None:
        """`disk`: mounted on `folder/disk`; None: only signals hit the daemon."""
        model = folder / "tiny"
        tiny.model().save_pretrained(model)
        tiny.tokenizer().save_pretrained(model)
        self.daemon = Daemon(folder / "disk" / "home", model, workers=WORKERS, http_port=0)
        self.daemon.folder = folder  # the user's files are elsewhere
        self.jobs: list[str] = []
        self.blows: Counter[str] = Counter()
        self._folder = folder
        self._random = random.Random(seed)
        self._wanted = jobs
        self._disk = disk
        self._undisturbed: dict[int, bytes] = {}  # weights, by the seed of the training
        self._copies: deque[Path] = deque()  # of Redis' data, the latest last
        self._due: list[tuple[float, Callable[[], None]]] = []  # the ends of what lasts
        self._rows = folder / "questions.jsonl"
        rows = [{"prompt": f"{n} and {n}"} for n in range(ROWS)]
        self._rows.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))

    def prepare(self) -> None:
        """Start the daemon, and train what the others are compared with."""
        self.daemon.start()
        twins = {seed: self._train(seed) for seed in range(0, VARIANTS, 2)}
        for seed, job_id in twins.items():
            self.daemon.wait(job_id, "finished")
            self._undisturbed[seed] = weights(self.daemon, job_id)

    def rage(self, seconds: float) -> None:
        """Submit and strike until the time is over, and all jobs are submitted."""
        begin = time.monotonic()
        end = begin + seconds
        while time.monotonic() < end or len(self.jobs) < self._wanted:
            self._copy_redis()
            passed = min((time.monotonic() - begin) / seconds, 1)
            self._submit_until(min(1 + int(self._wanted * passed), self._wanted))
            time.sleep(self._random.uniform(*PAUSE_S))
            self._end_due(time.monotonic())
            if self._start_if_gone() and time.monotonic() < end:
                self._strike()
        self._end_due(float("inf"))

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
            return self.daemon.client.jobs.get(job_id)["status"] in (
                "finished",
                "failed",
                "stopped",
            )
        return False

    def _submit_until(self, due: int) -> None:
        """Submit until there are so many jobs, of three kinds alternately."""
        while len(self.jobs) < due:
            try:
                self.jobs.append(self._submit(len(self.jobs)))
            except WarmdError as error:  # the daemon is restarting
                log.info("submit: %s", error)
                return

    def _submit(self, number: int) -> str:
        if number % 2 == 0:
            return self._train(number % VARIANTS)
        values = {"model": "tiny", "max_tokens": 12, "seed": number}
        if number % 4 == 1:
            values |= {"input": str(self._rows), "output": str(self._output(number))}
        else:
            values |= {"prompt": "1 and 2", "n": 4}
        return self.daemon.client.jobs.submit(
            spec_class("infer").parse(values), Queueing(retries=9)
        )

    def _train(self, seed: int) -> str:
        return self.daemon.submit(
            "behaviours:paced", samples=STEPS, save_every=1 + seed, retries=9, seed=seed
        )

    def _output(self, number: int) -> Path:
        return self.daemon.home.path.parent / f"out-{number}.jsonl"

    # --- blows --------------------------------------------------------------------------------

    def _strike(self) -> None:
        blows: dict[Callable[[], None], int] = {self._send_signal: 1}
        if self._disk is not None:
            blows = {
                self._send_signal: 8,
                partial(self._fill, self._disk): 3,
                partial(self._cut_power, self._disk): 3,
                self._set_redis_back: 3,
            }
        (blow,) = self._random.choices([*blows], [*blows.values()])
        blow()

    def _send_signal(self) -> None:
        victims = list(processes())
        shares = [*map(weight, victims)]
        if not any(shares):  # the last ones are just ending
            return
        (victim,) = self._random.choices(victims, shares)
        how = self._random.random()
        with contextlib.suppress(psutil.NoSuchProcess):
            if how < 0.15:
                then = self._random.choice((signal.SIGCONT, signal.SIGCONT, signal.SIGKILL))
                self._send(victim, signal.SIGSTOP)
                self._do_after(STOPPED_S, partial(self._send, victim, then))
            else:
                self._send(victim, signal.SIGKILL if how < 0.7 else self._random.choice(ENDING))

    def _send(self, victim: psutil.Process, blow: signal.Signals) -> None:
        log.info("%s %d %s", blow.name, victim.pid, " ".join(command_line(victim)[1:4]))
        victim.send_signal(blow)
        self.blows[blow.name] += 1

    def _fill(self, disk: Disk) -> None:
        """Leave no space on the disk for some seconds."""
        log.info("disk full")
        self.blows["disk full"] += 1
        with contextlib.suppress(OSError):  # others write meanwhile
            fill(disk.folder)
        self._do_after(FULL_S, partial(self._make_room, disk))

    def _make_room(self, disk: Disk) -> None:
        log.info("disk has space")
        with contextlib.suppress(FileNotFoundError):  # lost with the power
            make_room(disk.folder)

    def _cut_power(self, disk: Disk) -> None:
        """Lose what was not flushed, and all processes."""
        log.info("power lost")
        self.blows["power lost"] += 1
        disk.lose_power()
        self._kill_all()
        disk.come_back()

    def _set_redis_back(self) -> None:
        """Stop the daemon, or kill it, and restore an earlier copy of Redis' data."""
        copy = self._random.choice(self._copies)
        log.info("Redis back to its data of %s", copy.name)
        self.blows["Redis back"] += 1
        self._end_due(float("inf"))
        if self._random.random() < 0.5:
            with contextlib.suppress(WarmdError):
                self.daemon.stop()
        self._kill_all()
        folder = self.daemon.home.redis_folder
        shutil.rmtree(folder)
        shutil.copytree(copy, folder)
        subprocess.run(["sync", "--file-system", str(folder)], check=True)
        self._copies = deque([copy])  # the later ones are of a past that Redis no longer has

    def _copy_redis(self) -> None:
        copy = self._folder / "copies" / f"{time.time():.3f}"
        try:
            shutil.copytree(self.daemon.home.redis_folder, copy)
        except shutil.Error:  # a start replaces files just now
            shutil.rmtree(copy)
            return
        self._copies.append(copy)
        if len(self._copies) > COPIES:
            shutil.rmtree(self._copies.popleft())

    def _kill_all(self) -> None:
        self.daemon.client.close()
        wait_until(self._are_killed)

    def _are_killed(self) -> bool:
        """Kill all processes, also those that were forked meanwhile."""
        left = list(processes())
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return not left

    def _do_after(self, seconds: tuple[float, float], action: Callable[[], None]) -> None:
        self._due.append((time.monotonic() + self._random.uniform(*seconds), action))

    def _end_due(self, now: float) -> None:
        """End what lasts, if its time has come."""
        for item in [item for item in self._due if item[0] <= now]:
            self._due.remove(item)
            with contextlib.suppress(psutil.NoSuchProcess):
                item[1]()

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
        job = self.daemon.client.jobs.get(job_id)
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
        if number % 2 == 0 and weights(self.daemon, job_id) != self._undisturbed[number % VARIANTS]:
            yield "its weights differ from those of an undisturbed training"
        streamed = self.daemon.streamed(job_id)
        filed = logged[-len(streamed) :] if streamed else []
        pairs = zip_longest(streamed, filed)
        if (differing := next((pair for pair in pairs if pair[0] != pair[1]), None)) is not None:
            yield f"its stream differs from its file: {differing[0]}, {differing[1]}"
        if number % 4 == 1:
            lines = self._output(number).read_bytes().splitlines()
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
    parser.add_argument("--home", type=Path, help="where a copy of the home is left")
    parser.add_argument("--signals-only", action="store_true", help="needs no right to mount")
    arguments: Any = parser.parse_args()
    if os.getpid() != 1:
        sys.exit("random_storm: must be the first process of a PID namespace: see --help")
    child = os.fork()
    if child != 0:
        os._exit(reap_for(child) & 0xFF)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmd-")))
        disk = None
        (folder / "disk").mkdir(mode=0o700)
        if not arguments.signals_only:
            made = disk_without_power(folder / "disk", folder / "image", megabytes=DISK_MB)
            disk = stack.enter_context(made)
        storm = Storm(folder, seed=arguments.seed, jobs=arguments.jobs, disk=disk)
        try:
            storm.prepare()
            storm.rage(arguments.seconds)
            log.info("calm after %s", dict(storm.blows))
            storm.calm()
            problems = list(storm.check())
        finally:
            if arguments.home is not None:
                no_sockets = shutil.ignore_patterns("sockets")
                shutil.copytree(storm.daemon.home.path, arguments.home, ignore=no_sockets)
    sys.stdout.write("\n".join(problems) or f"nothing lost: {len(storm.jobs)} jobs")
    sys.stdout.flush()
    os._exit(bool(problems))


if __name__ == "__main__":
    main()
