"""Jobs of several processes in a real daemon: killed, paused, stopped; nothing left behind."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import sft_jobs
import torch
from daemons import Daemon, gone
from safetensors.torch import load_file
from waiting import wait_until

from warmd.configs.values import num_cores
from warmd.daemon.fork.activity import PERIOD_S
from warmd.jobs.errors import SpecError
from warmd.jobs.sft.options import SftSpec

pytestmark = pytest.mark.skipif(num_cores() < 2, reason="needs two cores")


def spec(folder: Path, **options: Any) -> SftSpec:
    usual: dict[str, Any] = {"model": "tiny", "epochs": 8, "save_every": 2, "processes": 2}
    return sft_jobs.spec(folder, **usual | options)


def weights(daemon: Daemon, job_id: str) -> dict[str, torch.Tensor]:
    return load_file(daemon.home.runs / job_id / "model" / "model.safetensors")


def processes_of(daemon: Daemon, job_id: str) -> list[psutil.Process] | None:
    """The processes of a running job, rank 0 first; None while they are not there."""
    started = daemon.events(job_id, "started")
    try:
        first = psutil.Process(started[-1]["pid"])
        return [first, *first.children(recursive=True)]
    except (IndexError, psutil.NoSuchProcess):
        return None


def all_gone(processes: list[psutil.Process]) -> bool:
    return all(gone(process) for process in processes)


@pytest.mark.slow
def test_a_job_whose_ranks_are_killed_ends_with_the_weights_of_an_uninterrupted_run(
    sturdy: Daemon, tmp_path: Path
):
    job = spec(tmp_path)
    straight = sturdy.client.jobs.submit(job)
    assert sturdy.wait(straight, timeout_s=120)["status"] == "finished"
    choice = random.Random(19)
    killed = sturdy.client.jobs.submit(job)
    for kills in range(5):

        def reached(kills: int = kills) -> list[psutil.Process] | None:
            if len(sturdy.events(killed, "started")) <= kills:
                return None
            steps = [e for e in sturdy.events(killed, "step") if e["execution"] == kills + 1]
            found = processes_of(sturdy, killed)
            return found if len(steps) >= choice.randint(1, 4) and found and found[1:] else None

        ranks = wait_until(reached, timeout_s=90)
        os.kill(choice.choice(ranks).pid, signal.SIGKILL)
        wait_until(partial(all_gone, ranks), timeout_s=20)
    assert sturdy.wait(killed, timeout_s=120)["status"] == "finished"
    assert len(sturdy.events(killed, "requeued")) == 5
    ours, theirs = weights(sturdy, killed), weights(sturdy, straight)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.slow
def test_a_job_of_two_processes_is_paused_stopped_and_resumed(sturdy: Daemon, tmp_path: Path):
    job = spec(tmp_path, epochs=40)
    job_id = sturdy.client.jobs.submit(job)
    wait_until(lambda: sturdy.events(job_id, "step"), timeout_s=60)
    sturdy.client.jobs.pause(job_id)
    wait_until(lambda: sturdy.events(job_id, "paused"), timeout_s=60)
    ranks = processes_of(sturdy, job_id)
    assert ranks is not None
    assert len(ranks) == 2
    sturdy.client.jobs.unpause(job_id)
    wait_until(lambda: sturdy.events(job_id, "unpaused"), timeout_s=60)
    sturdy.client.jobs.cancel(job_id)
    assert sturdy.wait(job_id, timeout_s=60)["status"] == "stopped"
    wait_until(partial(all_gone, ranks), timeout_s=20)
    stopped = sturdy.events(job_id, "stopped")[-1]["step"]
    assert sturdy.events(job_id, "checkpoint")[-1]["step"] == stopped


@pytest.mark.nightly(part="daemons", catches="a job that fails when a stop reaches all its ranks")
def test_a_request_to_stop_may_be_sent_to_all_processes(sturdy: Daemon, tmp_path: Path):
    job_id = sturdy.client.jobs.submit(spec(tmp_path, epochs=20))
    wait_until(lambda: sturdy.events(job_id, "step"), timeout_s=60)
    for rank in processes_of(sturdy, job_id) or []:
        rank.terminate()
    assert sturdy.wait(job_id, timeout_s=120)["status"] == "finished"
    [requeued] = sturdy.events(job_id, "requeued")
    assert requeued["reason"] == "the daemon stops"
    assert sturdy.events(job_id, "begin")[-1]["resumed_from"] == requeued["step"]


def _seconds_since(found: list[dict[str, Any]]) -> float:
    """The seconds between the first and the last of some events."""
    return found[-1]["time"] - found[0]["time"] if found else 0.0


@pytest.mark.nightly(part="storms", catches="a stall that is blamed on the wrong rank")
@pytest.mark.parametrize("number", [1, 0])
def test_a_suspended_rank_is_named_with_its_process(sturdy: Daemon, tmp_path: Path, number: int):
    # Without checkpoints: the limit of a save is ten minutes until five are known.
    job_id = sturdy.client.jobs.submit(spec(tmp_path, epochs=400, save_every=10_000))
    # The limit of a step is ten minutes until five are known, and is reported once a second.
    wait_until(
        lambda: _seconds_since(sturdy.events(job_id, "step")[6:]) > 2 * PERIOD_S, timeout_s=60
    )
    ranks = processes_of(sturdy, job_id)
    assert ranks is not None
    assert ranks[1].name() == "warmd-rank-1"
    ranks[number].suspend()
    [stall] = wait_until(lambda: sturdy.events(job_id, "stall"), timeout_s=60)
    ranks[number].resume()
    said = f"rank {number} (process {ranks[number].pid}) is in state T (stopped)"
    assert stall["message"] == said
    sturdy.client.jobs.kill(job_id)
    assert sturdy.wait(job_id)["status"] == "stopped"


def test_more_processes_than_cores_are_refused_at_submit(shared_daemon: Daemon, tmp_path: Path):
    more = num_cores() + 1
    known = shared_daemon.client.jobs.all()
    with pytest.raises(SpecError) as refused:
        shared_daemon.client.jobs.submit(spec(tmp_path, processes=more, batch_size=more))
    reason = f"must be at most {num_cores()}, the cores of this machine, got {more}"
    assert str(refused.value) == f"processes: {reason}"
    assert shared_daemon.client.jobs.all() == known
