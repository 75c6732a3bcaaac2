"""The proof that a job's resume is exact, on its own first steps.

Two scratch jobs of its spec go up to the same step of the same schedule: one straight, the other
stopped half-way, resumed, killed with -9 at a random instant and resumed once more. All that the
next step depends on is then compared to the bit.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from ...jobs.context import checkpoint_name
from ...jobs.errors import Conflict, JobFailed, SpecError
from ...jobs.training.compare import compare_events
from ..runs import events
from ..runs.rundir import RunDir
from .client import Client

_MOST_TRIES = 6  # at hitting a job before it is through
_KINDS = (
    ("weights", (".safetensors",)),
    ("optimizer", ("optimizer.pt", "scheduler.pt")),
    ("random numbers", ("rng_state.pth",)),
    ("job state", ("job_state.pt", "trainer_state.json")),
)


@dataclass(frozen=True)
class Finding:
    """One thing that was compared."""

    what: str
    difference: str | None  # the first, None when there is none


@dataclass(frozen=True)
class Verdict:
    """What came out."""

    steps: int
    killed_at_step: int  # the last one that was seen before the kill
    resumed_from: int
    findings: list[Finding]

    @property
    def is_exact(self) -> bool:
        return all(finding.difference is None for finding in self.findings)


def prove(client: Client, job_id: str, *, steps: int, say: Callable[[str], None]) -> Verdict:
    """Run the drill; `say` is told what happens. The scratch jobs are gone afterwards.

    Raises SpecError for a job without steps, JobFailed when a scratch job fails, Conflict when
    the steps are over too soon to be interrupted.
    """
    total = client.job(job_id)["steps_total"]
    spec = client.rundir(job_id).read_spec()["spec"]
    if total is None or "save_every" not in spec:
        raise SpecError("job", f"must be a training, got {job_id}")
    steps = min(steps, total)
    if steps < 2:
        raise SpecError("steps", f"must be at least 2 to be interrupted, got {steps}")
    with _Scratch(client, job_id, say) as scratch:
        straight = scratch.submit(stop_at=steps)
        say(f"{straight}: {steps} steps straight")
        scratch.wait(straight)
        begun = _first(client.rundir(straight), "begin")
        window_s = (_last_time(client.rundir(straight)) - begun["time"]) * 0.8
        for _ in range(_MOST_TRIES):
            broken = scratch.submit(stop_at=steps // 2)
            say(f"{broken}: stopped after {steps // 2}")
            scratch.wait(broken)
            if scratch.resume_and_kill(broken, stop_at=steps, after_s=random.uniform(0, window_s)):
                scratch.wait(broken)
                return _verdict(client.rundir(straight), client.rundir(broken), steps)
            scratch.remove(broken)
            window_s /= 2
    raise Conflict(
        f"job: its {steps} steps were over before the kill, {_MOST_TRIES} times: try more --steps"
    )


class _Scratch:
    """Jobs that are removed when the block is left, whatever they do."""

    def __init__(self, client: Client, job_id: str, say: Callable[[str], None]) -> None:
        self._client = client
        self._job_id = job_id
        self._say = say
        self._ids: list[str] = []

    def __enter__(self) -> _Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        for job_id in list(self._ids):
            self.remove(job_id)

    def submit(self, *, stop_at: int) -> str:
        job_id = self._client.submit_again(self._job_id, stop_at=stop_at)
        self._ids.append(job_id)
        return job_id

    def wait(self, job_id: str) -> None:
        """Wait until the job has come as far as it is to come. Raises JobFailed."""
        is_told = False
        for event in self._client.follow(job_id):
            if event is None and not is_told and self._client.job(job_id)["status"] == "queued":
                self._say(f"{job_id}: waits until a worker is free")
                is_told = True
        job = self._client.job(job_id)
        if job["status"] not in ("stopped", "finished"):
            raise JobFailed(f"{job_id} {job['status']}: {job['error']}")

    def resume_and_kill(self, job_id: str, *, stop_at: int, after_s: float) -> bool:
        """Have the job go on, and kill its process some time after it began.

        False when it was through before.
        """
        rundir = self._client.rundir(job_id)
        seq = max(event["seq"] for event in events.read(rundir.events))
        rundir.revise(stop_at=stop_at)
        self._client.resume(job_id, front=True)
        for event in self._client.follow(job_id, after_seq=seq):
            if event is not None and event["type"] == "begin":
                time.sleep(after_s)
                pid = rundir.holder()
                if pid is None:
                    return False
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._say(f"{job_id}: killed {after_s:.2f} s after it went on")
                break
        self.wait(job_id)
        # One that had written its last event already is not begun again.
        begins = [e for e in events.read(rundir.events) if e["type"] == "begin" and e["seq"] > seq]
        return len(begins) > 1

    def remove(self, job_id: str) -> None:
        with contextlib.suppress(Conflict):  # it has ended
            self._client.kill(job_id)
        for _ in self._client.follow(job_id):
            pass
        self._client.remove(job_id)
        self._ids.remove(job_id)


def _verdict(straight: RunDir, broken: RunDir, steps: int) -> Verdict:
    folders = [run.checkpoints / checkpoint_name(steps) for run in (straight, broken)]
    differences = _compare(*folders)
    findings = []
    for what, endings in _KINDS:
        names = [name for name in differences if name.endswith(endings)]
        problems = [f"{n}: {problem}" for n in names if (problem := differences.pop(n)) is not None]
        findings.append(Finding(what, problems[0] if problems else None))
    rest = [f"{name}: {problem}" for name, problem in differences.items() if problem is not None]
    findings.append(Finding("other files", rest[0] if rest else None))
    told = [list(events.read(run.events)) for run in (straight, broken)]
    _, problem = compare_events(*told)
    findings.append(Finding("events of the steps", problem))
    begin = [event for event in told[1] if event["type"] == "begin"][-1]
    before = [e["step"] for e in told[1] if e["seq"] < begin["seq"] and e["type"] == "step"]
    return Verdict(steps, max(before, default=0), begin["resumed_from"] or 0, findings)


def _compare(one: Path, other: Path) -> dict[str, str | None]:
    command = [sys.executable, "-m", "warmd.jobs.training.compare", str(one), str(other)]
    done = subprocess.run(command, capture_output=True)
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise JobFailed(f"the checkpoints cannot be compared: {reason}")
    found: dict[str, str | None] = orjson.loads(done.stdout)
    return found


def _first(rundir: RunDir, type: str) -> dict[str, Any]:
    return next(event for event in events.read(rundir.events) if event["type"] == type)


def _last_time(rundir: RunDir) -> float:
    return max(float(event["time"]) for event in events.read(rundir.events))
