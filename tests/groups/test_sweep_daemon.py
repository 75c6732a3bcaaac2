"""Sweeps in a real daemon: jobs that continue equal uninterrupted trainings exactly."""

from __future__ import annotations

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from daemons import Daemon
from waiting import wait_until

from warmd.daemon.runs import events
from warmd.jobs import spec_class

SUPPORT = Path(__file__).parents[1] / "support"
RATES = ["1e-4", "3e-3", "1e-2"]


def options(daemon: Daemon) -> dict[str, Any]:
    """Options of a GRPO job on the tiny model, made by the helper of single jobs."""
    job_id = daemon.submit("tiny:digit_share", eval_samples=4)
    daemon.client.jobs.kill(job_id)
    daemon.wait(job_id)
    return dict(daemon.client.rundir(job_id).read_spec()["spec"])


def submit(daemon: Daemon, values: dict[str, Any], **given: Any) -> str:
    with contextlib.chdir(SUPPORT):
        return daemon.client.groups.submit_sweep("grpo", values, given)


def ended(daemon: Daemon, sweep_id: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        sweep = daemon.client.groups.sweep(sweep_id)
        return sweep if sweep["status"] in ("finished", "failed", "stopped") else None

    sweep: dict[str, Any] = wait_until(found, timeout_s=120)
    return sweep


def check_straight(daemon: Daemon, values: dict[str, Any], sweep: dict[str, Any]) -> None:
    """Train the best point's jobs anew without stops; compare weights and metrics bit by bit."""
    point = sweep["points"][sweep["best"]]
    assert sweep["rungs"] == [2, 6]
    for job in point["jobs"]:
        given = {**values, **point["values"], "seed": job["seed"]}
        with contextlib.chdir(SUPPORT):
            straight = daemon.client.jobs.submit(spec_class("grpo").parse(given))
        daemon.wait(straight)
        swept = daemon.client.rundir(job["id"])
        alone = daemon.client.rundir(straight)
        weights = "model/model.safetensors"
        assert (swept.path / weights).read_bytes() == (alone.path / weights).read_bytes()
        assert steps_of(swept) == steps_of(alone)
        assert {e["step"] for e in events.read(swept.events) if e["type"] == "eval"} == {0, 2, 6}


def steps_of(rundir: Any) -> list[tuple[int, float, float]]:
    found = events.read(rundir.events)
    return [(e["step"], e["loss"], e["reward"]) for e in found if e["type"] == "step"]


@pytest.mark.slow
def test_a_survivor_of_halving_equals_the_same_job_without_stops(shared_daemon):
    values = options(shared_daemon)
    sweep_id = submit(shared_daemon, values, sweep={"learning_rate": RATES}, seeds=3, halving=3)
    sweep = ended(shared_daemon, sweep_id)
    assert sweep["statuses"] == {"finished": 3, "stopped": 6}
    assert [point["n"] for point in sweep["points"]] == [3, 3, 3]
    check_straight(shared_daemon, values, sweep)


@pytest.mark.nightly(
    part="storms", catches="a sweep with another result after its horses or driver were killed"
)
def test_a_sweep_ends_the_same_whatever_is_killed_meanwhile(sturdy):
    values = options(sturdy)
    sweep_id = submit(sturdy, values, sweep={"learning_rate": RATES}, halving=3)
    members = sturdy.client.groups.sweep_members(sweep_id)
    kills = 0
    for job_id in members:
        wait_until(partial(sturdy.events, job_id, "step"), timeout_s=60)
        with contextlib.suppress(Exception):  # it may have ended just now
            os.kill(sturdy.pid("horse"), signal.SIGKILL)
            kills += 1
        for child in sturdy.processes():
            with contextlib.suppress(Exception):
                if "warmd.daemon.groups" in child.cmdline():
                    child.kill()
                    kills += 1
    assert kills
    sturdy.kill("supervisor")
    sweep = ended(sturdy, sweep_id)
    seen = [[(e["type"], e["step"]) for e in sturdy.events(job_id)[-5:]] for job_id in members]
    assert sweep["statuses"] == {"finished": 1, "stopped": 2}, (sweep, seen)
    check_straight(sturdy, values, sweep)


@pytest.mark.nightly(
    part="storms", catches="a sweep that ends otherwise once Redis has lost everything"
)
def test_a_sweep_ends_the_same_if_redis_loses_everything_meanwhile(sturdy):
    values = options(sturdy)
    sweep_id = submit(sturdy, values, sweep={"learning_rate": RATES}, halving=3)
    members = sturdy.client.groups.sweep_members(sweep_id)
    for number, job_id in enumerate(members):
        wait_until(partial(sturdy.events, job_id, "step"), timeout_s=60)
        if number:  # a member waits at the rung, one runs, one waits
            sturdy.kill_everything()
            sturdy.damage_redis()
            sturdy.start()
    sweep = ended(sturdy, sweep_id)
    assert sweep["statuses"] == {"finished": 1, "stopped": 2}
    check_straight(sturdy, values, sweep)
