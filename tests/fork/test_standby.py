"""Standby horses: a process forked ahead runs the next job; no job is lost if it dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import psutil
import pytest
from daemons import Daemon, gone
from waiting import wait_until

from warmd.configs.config import ModelConfig, WorkerConfig
from warmd.daemon.client import control

pytestmark = pytest.mark.slow

WORKER = WorkerConfig(name="train-0", queue="train", threads=1, standby=True)


@pytest.fixture(scope="module")
def daemon(daemons: Callable[..., Daemon]) -> Iterator[Daemon]:
    with_standby = daemons(workers=(WORKER,))
    with_standby.start()
    yield with_standby
    with_standby.close()


def standby(daemon: Daemon, *, other_than: int = 0) -> int:
    """Wait for the daemon's standby horse; return its process id."""

    def found() -> int | None:
        pids: list[int] = daemon.status()["zygote"]["standbys"]
        return pids[0] if pids and pids[0] != other_than else None

    pid: int = wait_until(found)
    return pid


def pid_of(daemon: Daemon, job_id: str) -> int:
    """The process that ran a job to its end."""
    assert daemon.wait(job_id)["status"] == "finished"
    started = next(event for event in daemon.events(job_id) if event["type"] == "started")
    return int(started["pid"])


def test_a_job_runs_in_the_process_that_was_forked_ahead(daemon):
    ahead = standby(daemon)
    assert pid_of(daemon, daemon.submit()) == ahead
    next_one = standby(daemon, other_than=ahead)
    assert pid_of(daemon, daemon.submit()) == next_one


def test_a_standby_horse_is_replaced_when_a_model_is_loaded(daemon, tiny_model):
    before = standby(daemon)
    process = psutil.Process(before)
    control.load_model(daemon.config, ModelConfig(name="second", path=str(tiny_model)))
    wait_until(lambda: gone(process))
    after = standby(daemon, other_than=before)
    assert pid_of(daemon, daemon.submit(model="second")) == after


def test_a_job_starts_although_the_standby_horse_was_killed(daemon):
    killed = standby(daemon)
    os.kill(killed, signal.SIGKILL)
    job_id = daemon.submit()
    assert pid_of(daemon, job_id) != killed
    assert daemon.client.jobs.get(job_id)["execution"] == 1
    assert standby(daemon, other_than=killed)


def test_a_job_of_a_standby_horse_is_resumed_when_it_is_killed(daemon):
    ahead = standby(daemon)
    job_id = daemon.submit(steps=40, save_every=1)
    wait_until(lambda: any(event["type"] == "checkpoint" for event in daemon.events(job_id)))
    os.kill(ahead, signal.SIGKILL)
    assert daemon.wait(job_id)["status"] == "finished"
    assert daemon.client.jobs.get(job_id)["execution"] == 2


@pytest.mark.nightly(part="daemons", catches="a standby horse that outlives its zygote")
def test_a_standby_horse_ends_with_its_zygote(daemon):
    process = psutil.Process(standby(daemon))
    daemon.kill("zygote")
    wait_until(lambda: gone(process))
    assert pid_of(daemon, daemon.submit())
