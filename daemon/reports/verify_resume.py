"""`checkpoints verify --resume`: checks on a job's first steps that resuming is bit-exact.

Two scratch jobs with the job's spec run to the same step of the same schedule. One runs without
interruption; the other is stopped half-way, resumed, killed with SIGKILL at a random time and
resumed again. Everything that the next step depends on is then compared bit by bit.
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

from ...configs.queues import TRAIN
from ...jobs.compute import cache
from ...jobs.context import checkpoint_name
from ...jobs.errors import Conflict, JobFailed, SpecError, Unavailable
from ...jobs.training.compare import compare_events
from ..client.client import Client
from ..runs import events
from ..runs.rundir import RunDir

_MAX_TRIES = 6  # to kill a job before it ends
_ABSENT_S = 30.0  # without a worker: a daemon that is restarted is back before that
_KINDS = (
    ("weights", (".safetensors",)),
    ("optimizer", ("optimizer.pt", "scheduler.pt")),
    ("random numbers", ("rng_state.pth",)),
    ("job state", ("job_state.pt", "trainer_state.json")),
)


@dataclass(frozen=True)
class Finding:
    """The comparison of one part of the state."""

    what: str
    difference: str | None  # the first one found


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison."""

    steps: int
    killed_at_step: int  # the last step that was logged before the kill
    resumed_from: int
    findings: list[Finding]
    device: str = "cpu"
    deterministic: bool = True  # the job's option

    @property
    def is_exact(self) -> bool:
        return all(finding.difference is None for finding in self.findings)


def verify(client: Client, job_id: str, *, steps: int, report: Callable[[str], None]) -> Verdict:
    """Run the check; `report` receives its progress. Removes the scratch jobs.

    Raises SpecError for a job without steps, JobFailed if a scratch job fails, Conflict if the
    steps end too soon to be interrupted, Unavailable if no worker takes them.
    """
    total = client.jobs.get(job_id)["steps_total"]
    spec = client.rundir(job_id).read_spec()["spec"]
    if spec.get("time_limit") is not None:
        raise SpecError("job", f"must have steps, not a time limit, got {job_id}")
    if total is None or "save_every" not in spec:
        raise SpecError("job", f"must be a training job, got {job_id}")
    steps = min(steps, total)
    if steps < 2:
        raise SpecError("steps", f"must be at least 2 to be interrupted, got {steps}")
    if not client.nodes.serving(TRAIN):
        raise _no_worker()
    with _ScratchJobs(client, job_id, report) as scratch:
        straight = scratch.submit(stop_at=steps)
        report(f"{straight}: {steps} steps without interruption")
        scratch.wait(straight)
        begun = _first(client.rundir(straight), "begin")
        window_s = (_last_time(client.rundir(straight)) - begun["time"]) * 0.8
        for _ in range(_MAX_TRIES):
            broken = scratch.submit(stop_at=steps // 2)
            report(f"{broken}: stopped after {steps // 2}")
            scratch.wait(broken)
            if scratch.resume_and_kill(broken, stop_at=steps, after_s=random.uniform(0, window_s)):
                scratch.wait(broken)
                return _verdict(client.rundir(straight), client.rundir(broken), steps)
            scratch.remove(broken)
            window_s /= 2
    raise Conflict(
        f"job: its {steps} steps were done before the kill, {_MAX_TRIES} times: try more --steps"
    )


class _ScratchJobs:
    """Jobs that are removed at the end of the `with` block, whatever their status."""

    def __init__(self, client: Client, job_id: str, report: Callable[[str], None]) -> None:
        self._client = client
        self._job_id = job_id
        self._report = report
        self._ids: list[str] = []

    def __enter__(self) -> _ScratchJobs:
        return self

    def __exit__(self, *_: object) -> None:
        for job_id in list(self._ids):
            self.remove(job_id)

    def submit(self, *, stop_at: int) -> str:
        job_id = self._client.jobs.submit_again(self._job_id, stop_at=stop_at)
        self._ids.append(job_id)
        return job_id

    def wait(self, job_id: str) -> None:
        """Wait until the job has reached its last requested step.

        Raises JobFailed, and Unavailable where the last worker has left.
        """
        has_reported = False
        absent_since: float | None = None
        for event in self._client.jobs.follow(job_id):
            if event is not None or self._client.jobs.get(job_id)["status"] != "queued":
                absent_since = None
            elif not self._client.nodes.serving(TRAIN):
                absent_since = absent_since or time.monotonic()
                if time.monotonic() - absent_since > _ABSENT_S:
                    raise _no_worker()
            elif not has_reported:
                self._report(f"{job_id}: waits for a free worker")
                has_reported = True
        job = self._client.jobs.get(job_id)
        if job["status"] not in ("stopped", "finished"):
            raise JobFailed(f"{job_id} {job['status']}: {job['error']}")

    def resume_and_kill(self, job_id: str, *, stop_at: int, after_s: float) -> bool:
        """Resume the job, and kill its process `after_s` after it began.

        False if it had ended before, or had saved its last step.
        """
        rundir = self._client.rundir(job_id)
        seq = max(event["seq"] for event in events.read(rundir.events))
        rundir.revise(stop_at=stop_at)
        self._client.jobs.resume(job_id, front=True)
        for event in self._client.jobs.follow(job_id, after_seq=seq):
            if event is not None and event["type"] == "begin":
                time.sleep(after_s)
                pid = rundir.holder()
                if pid is None:
                    return False
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                self._report(f"{job_id}: killed {after_s:.2f} s after it resumed")
                break
        self.wait(job_id)
        # A job that had already written its last event is not started again, and one that had saved
        # its last step has none left to repeat.
        begins = [e for e in events.read(rundir.events) if e["type"] == "begin" and e["seq"] > seq]
        return len(begins) > 1 and begins[-1]["resumed_from"] < stop_at

    def remove(self, job_id: str) -> None:
        with contextlib.suppress(Conflict):  # it has ended
            self._client.jobs.kill(job_id)
        for _ in self._client.jobs.follow(job_id):
            pass
        self._client.jobs.remove(job_id)
        self._ids.remove(job_id)


def _no_worker() -> Unavailable:
    return Unavailable(
        f"no worker takes jobs of the queue {TRAIN}: start a daemon that has one, for example with "
        f"`warmd start --workers train-0={TRAIN}`; `warmd nodes` lists the daemons"
    )


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
    logged = [list(events.read(run.events)) for run in (straight, broken)]
    _, problem = compare_events(*logged)
    findings.append(Finding("events of the steps", problem))
    begin = [event for event in logged[1] if event["type"] == "begin"][-1]
    before = [e["step"] for e in logged[1] if e["seq"] < begin["seq"] and e["type"] == "step"]
    return Verdict(
        steps,
        max(before, default=0),
        begin["resumed_from"] or 0,
        findings,
        device=begin["device"],
        deterministic=broken.read_spec()["spec"].get("deterministic", True),
    )


def _compare(one: Path, other: Path) -> dict[str, str | None]:
    cache.keep_library_caches()
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
