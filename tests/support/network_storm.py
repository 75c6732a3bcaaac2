"""Break the network of three machines at random while they work, then check that nothing was lost.

    unshare --pid --fork --mount-proc \\
        python tests/support/network_storm.py --seconds 300 --jobs 60 --seed 1

Cables are cut, slow, deaf or reset, machines are suspended, lose their power or are shut down, and
Redis is killed; each for shorter and for longer than a lease. The machines' clocks are minutes
apart. The file locks of a run directory are removed again and again, as on a file system without
locks: what keeps two executions apart is then the lease and the fence.

Afterwards every job has to be finished, with each step once and the weights of an uninterrupted
run, and the machines, when they have left, leave no process and no key behind.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import mlm_jobs
import psutil
import sft_jobs
import tiny
from machines import Machines, machines
from random_storm import reap_for

from warmd.daemon.queue import keys
from warmd.daemon.queue.keys import LEASE_S
from warmd.daemon.runs import events
from warmd.jobs import spec_class
from warmd.jobs.errors import WarmdError

log = logging.getLogger("storm")

CALM_S = 180.0  # the longest time without the end of a job, after the faults
PAUSE_S = (1.0, 5.0)  # between two blows
SHORT_S, LONG_S = (1.0, 8.0), (LEASE_S + 3, LEASE_S + 15)
LOCKS_S = 2.0  # between two removals of the locks of run directories
# A worker looks at its lease four times a second, and the machine is busy: so long after it was
# resumed, a horse whose job has gone elsewhere must have ended.
GONE_S = 10.0
BLOWS = {"cut": 4, "deaf": 2, "reset": 2, "slow": 2, "suspend": 3, "power": 1, "drain": 1}
REDIS_SHARE = 0.08  # of all blows


class Storm:
    """The machines, their jobs, and what hits them."""

    def __init__(self, made: Machines, *, seed: int, jobs: int) -> None:
        self.machines = made
        self.jobs: dict[str, int] = {}  # id -> number of its variant
        self.blows: Counter[str] = Counter()
        self.problems: list[str] = []
        self._random = random.Random(seed)
        self._wanted = jobs
        self._until: dict[str, tuple[float, str]] = {}  # machine -> end of its blow, and which
        self._resumed_at: defaultdict[str, float] = defaultdict(float)
        self._overlaps: dict[tuple[str, int], float] = {}
        self._is_over = threading.Event()
        self._texts = mlm_jobs.make_home(_made(made.folder / "texts"))
        rows = sft_jobs.ROWS["prompt and completion"]
        self._rows = sft_jobs.write(made.folder / "sft.jsonl", rows)

    # --- jobs ---------------------------------------------------------------------------------

    def submit(self, variant: int) -> str:
        """Submit one of six jobs: of three kinds, short and long."""
        long = variant >= 3
        match variant % 3:
            case 0:
                return self.machines.submit(epochs=4 if long else 2, seed=variant)
            case 1:
                steps = 200 if long else 40
                spec = mlm_jobs.text_spec(self._texts, steps=steps, save_every=5, keep=2)
                return self.machines.client.jobs.submit(spec)
        values: dict[str, Any] = {
            "model": "tiny",
            "dataset": self._rows,
            "steps": 60 if long else 20,
        }
        values |= {"batch_size": 2, "save_every": 4, "learning_rate": 1e-3}
        return self.machines.client.jobs.submit(spec_class("sft").parse(values))

    def rage(self, seconds: float) -> None:
        """Submit and strike until the time is over, and all jobs are submitted."""
        for thread in (self._watch, self._unlock):
            threading.Thread(target=thread, daemon=True).start()
        for name in self.machines.clocks:
            self.machines.boot(name, "--queues", "train")
        self.machines.wait_ready(*self.machines.clocks, timeout_s=CALM_S)
        begin = time.monotonic()
        end = begin + seconds
        while time.monotonic() < end or len(self.jobs) < self._wanted:
            due = int(self._wanted * min((time.monotonic() - begin) / seconds * 2, 1)) + 1
            while len(self.jobs) < min(due, self._wanted):
                variant = len(self.jobs) % 6
                try:
                    self.jobs[self.submit(variant)] = variant
                except WarmdError as error:  # Redis restarts
                    log.info("submit: %s", error)
                    break
            time.sleep(self._random.uniform(*PAUSE_S))
            self._heal(time.monotonic())
            self._boot_ended()
            if time.monotonic() < end:
                self._strike()
        self._heal(float("inf"))

    def calm(self, jobs: list[str]) -> None:
        """Wait until all jobs have ended, however many are left."""
        deadline = time.monotonic() + CALM_S
        while left := [job_id for job_id in jobs if not self._has_ended(job_id)]:
            if len(left) < len(jobs):
                jobs, deadline = left, time.monotonic() + CALM_S
            if time.monotonic() > deadline:
                raise AssertionError(f"none of these ended in {CALM_S:.0f} s: {left}")
            self._boot_ended()
            time.sleep(0.5)

    def _has_ended(self, job_id: str) -> bool:
        with contextlib.suppress(WarmdError):
            return self.machines.client.jobs.get(job_id)["status"] in (
                "finished",
                "failed",
                "stopped",
            )
        return False

    # --- blows --------------------------------------------------------------------------------

    def _strike(self) -> None:
        if self._random.random() < REDIS_SHARE:
            self.blows["redis"] += 1
            log.info("redis: kill")
            self.machines.kill_redis()
            time.sleep(self._random.uniform(0.0, 3.0))
            self.machines.start_redis()
            return
        whole = [name for name in self.machines.clocks if name not in self._until]
        if not whole:
            return
        name = self._random.choice(whole)
        (blow,) = self._random.choices(list(BLOWS), list(BLOWS.values()))
        lasts_s = self._random.uniform(*self._random.choice((SHORT_S, LONG_S)))
        self._until[name] = time.monotonic() + lasts_s, blow
        self.blows[blow] += 1
        log.info("%s: %s for %.1f s", name, blow, lasts_s)
        match blow:
            case "slow":
                self.machines.cable(name, "up", delay_s=0.1, jitter_s=0.025)
            case "suspend":
                self.machines.suspend(name)
            case "power":
                self.machines.power_off(name)
            case "drain":
                self.machines.drain(name)
            case _:
                self.machines.cable(name, blow)

    def _heal(self, now: float) -> None:
        for name, (until, blow) in list(self._until.items()):
            if until > now:
                continue
            log.info("%s: end of %s", name, blow)
            del self._until[name]
            if blow == "suspend":
                self._resumed_at[name] = time.monotonic()
                self.machines.resume(name)
            elif blow in ("power", "drain"):
                self.machines.wait_off(name)
                self.machines.boot(name, "--queues", "train")
            else:
                self.machines.cable(name, "up")

    def _boot_ended(self) -> None:
        """Start nodes again that have ended because Redis could not be reached at their start."""
        for name in self.machines.clocks:
            if name not in self._until and self.machines.has_ended(name):
                log.info("%s: boot", name)
                self.machines.boot(name, "--queues", "train")

    def _unlock(self) -> None:
        """Take the locks of run directories away from their holders."""
        while not self._is_over.wait(LOCKS_S):
            for lock in self.machines.runs.glob("*/lock"):
                lock.unlink(missing_ok=True)

    # --- what must hold -----------------------------------------------------------------------

    def _watch(self) -> None:
        """Check for jobs that two machines run at once."""
        while not self._is_over.wait(0.5):
            running: defaultdict[str, set[str]] = defaultdict(set)
            for name in self.machines.clocks:
                if time.monotonic() - self._resumed_at[name] < GONE_S:
                    continue
                for process in self.machines.processes(name):
                    with contextlib.suppress(psutil.Error, OSError):
                        if process.status() != psutil.STATUS_STOPPED:
                            for job_id in self._writes(process.pid):
                                running[job_id].add(name)
            for job_id, names in running.items():
                if len(names) > 1:
                    self.problems.append(f"{job_id}: runs on {sorted(names)} at once")

    def _writes(self, pid: int) -> Iterator[str]:
        """The jobs whose events a horse has open for as long as it runs them."""
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                path = Path(os.readlink(link))
                if path.name == "log.txt" and path.parent.parent == self.machines.runs:
                    yield path.parent.name

    def check(self) -> None:
        """Record each job that differs from its uninterrupted run, and everything left behind."""
        for job_id in self.jobs:
            self.problems += [f"{job_id}: {problem}" for problem in self._problems(job_id)]
        straight = {variant: self.submit(variant) for variant in sorted(set(self.jobs.values()))}
        self.calm(list(straight.values()))
        wanted = {variant: self._weights(job_id) for variant, job_id in straight.items()}
        for job_id, variant in self.jobs.items():
            if self._weights(job_id) != wanted[variant]:
                self.problems.append(f"{job_id}: weights differ from {straight[variant]}")
        self._is_over.set()
        self._check_leftovers()

    def _problems(self, job_id: str) -> Iterator[str]:
        job = self.machines.client.jobs.get(job_id)
        if job["status"] != "finished":
            yield f"{job['status']}: {job['error']}"
            return
        rundir = self.machines.client.rundir(job_id)
        found = list(events.read(rundir.events))
        if [e["seq"] for e in found] != list(range(1, len(found) + 1)):
            yield "events are missing or twice"
        if Counter(e["type"] for e in found)["finished"] != 1:
            yield "it finished more than once"
        steps = [e["step"] for e in found if e["type"] == "step"]
        if not steps or steps != list(range(1, len(steps) + 1)):
            yield f"steps: {steps}"
        for path in rundir.path.rglob(".*"):
            yield f"left behind: {path}"

    def _weights(self, job_id: str) -> str:
        files = sorted((self.machines.runs / job_id / "model").glob("*.safetensors"))
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()

    def _check_leftovers(self) -> None:
        for name in self.machines.clocks:
            self.machines.drain(name)
        for name in self.machines.clocks:
            self.machines.wait_off(name)
        deadline = time.monotonic() + 2 * LEASE_S  # leases of dead workers end by themselves
        while (left := self._keys_of_workers()) and time.monotonic() < deadline:
            time.sleep(0.5)
        self.problems += [f"left in Redis: {key}" for key in left]

    def _keys_of_workers(self) -> list[str]:
        patterns = [keys.WORKERS, keys.NODES, keys.LEADER, keys.lease("*"), keys.taken("*")]
        patterns += ["rq:worker*", "rq:wip:*", "rq:execution*"]
        scan = self.machines.client.connection.scan_iter
        return sorted(keys.text(key) for pattern in patterns for key in scan(match=pattern))

    def executions(self) -> int:
        """How many executions the jobs took."""
        return sum(self.machines.client.jobs.get(job_id)["execution"] for job_id in self.jobs)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--logs", type=Path, help="folder for the logs of the machines")
    arguments: Any = parser.parse_args()
    if os.getpid() != 1:
        sys.exit("network_storm: must be the first process of a PID namespace: see --help")
    child = os.fork()
    if child != 0:
        os._exit(reap_for(child) & 0xFF)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        model = Path(folder) / "tiny"
        tiny.model().save_pretrained(model)
        tiny.tokenizer().save_pretrained(model)
        with machines(model) as made:
            storm = Storm(made, seed=arguments.seed, jobs=arguments.jobs)
            try:
                storm.rage(arguments.seconds)
                log.info("calm after %s", dict(storm.blows))
                storm.calm(list(storm.jobs))
                log.info("%d jobs took %d executions", len(storm.jobs), storm.executions())
                storm.check()
            finally:
                if arguments.logs is not None:
                    made.copy_logs(arguments.logs)
    problems = list(dict.fromkeys(storm.problems))
    sys.stdout.write("\n".join(problems) or f"nothing lost: {len(storm.jobs)} jobs")
    sys.stdout.flush()
    os._exit(bool(problems))


if __name__ == "__main__":
    main()
