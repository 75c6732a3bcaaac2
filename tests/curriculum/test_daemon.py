"""Curricula in a real daemon: kill -9 at gates and in stages changes nothing."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon
from waiting import wait_until

from warmd.configs.config import WorkerConfig
from warmd.jobs.errors import WarmdError

DEMO = Path(__file__).parents[2] / "configs" / "demo"
WORKERS = (
    WorkerConfig(name="train-0", queue="train", threads=1),
    WorkerConfig(name="infer-0", queue="infer", isolation="resident", slots=4, threads=1),
)


def submit(daemon: Daemon) -> str:
    """Stages on the demo model; the learning rate of the second one ruins it three times."""
    given = {
        "stages": [
            {"name": "good", "samples": 6, "learning_rate": 3e-4},
            {"name": "broken", "samples": 20, "learning_rate": 0.05},
        ],
        "gate": {"samples": 60, "most_samples": 120, "max_tokens": 4},
    }
    values = {"model": str(DEMO), "save_every": "2"}
    return str(daemon.client.submit_curriculum("grpo", values, given))


def ended(daemon: Daemon, curriculum_id: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        with contextlib.suppress(WarmdError):  # Redis may be away for a moment
            one = daemon.client.curriculum(curriculum_id)
            return one if one["status"] in ("finished", "failed") else None
        return None

    one: dict[str, Any] = wait_until(found, timeout_s=180)
    return one


def outcome(daemon: Daemon, found: dict[str, Any]) -> list[Any]:
    """Decisions with their numbers, and the weights of each attempt."""
    weights = "model/model.safetensors"
    return [
        (
            attempt["stage"],
            attempt["decision"],
            attempt["comparison"],
            (daemon.client.rundir(attempt["job"]).path / weights).read_bytes(),
        )
        for attempt in found["attempts"]
    ]


@pytest.mark.slow
def test_a_curriculum_killed_at_its_gates_and_in_its_stages_equals_the_straight_one(make_daemon):
    daemon = make_daemon(workers=WORKERS)
    daemon.start()
    straight = ended(daemon, submit(daemon))
    decisions = [attempt["decision"] for attempt in straight["attempts"]]
    assert decisions == ["continue", "roll back", "roll back", "give up"]
    curriculum_id = submit(daemon)
    known: set[str] = set()

    def newest() -> str | None:
        """A job of the curriculum that has started and was not seen before."""
        with contextlib.suppress(WarmdError):
            jobs = daemon.client.several(daemon.client.curriculum(curriculum_id)["jobs"])
            started = [job["id"] for job in jobs if job["started_at"] and job["id"] not in known]
            return started[0] if started else None
        return None

    for number in range(5):  # train, eval before, eval after, train, eval after
        known.add(job_id := wait_until(newest, timeout_s=90))
        for process in daemon.processes():
            with contextlib.suppress(Exception):  # it may have ended just now
                if "warmd.daemon.curriculum" in process.cmdline():
                    process.kill()
        holder = daemon.client.rundir(job_id).holder()
        if holder is not None:
            os.kill(holder, signal.SIGKILL)
        if number == 2:
            daemon.kill("supervisor")
    killed = ended(daemon, curriculum_id)
    assert outcome(daemon, killed) == outcome(daemon, straight)
