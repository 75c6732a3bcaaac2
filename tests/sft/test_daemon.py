"""Supervised fine-tuning by a real daemon: a killed job ends with the same weights."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import sft_jobs
import torch
from daemons import Daemon
from safetensors.torch import load_file
from waiting import wait_until

from warmd.jobs.errors import SpecError
from warmd.jobs.sft.options import SftSpec


def spec(folder: Path, **options: Any) -> SftSpec:
    usual: dict[str, Any] = {
        "model": "tiny",
        "epochs": 6,
        "save_every": 4,
        "eval_samples": 4,
        "eval_every": 10,
    }
    return sft_jobs.spec(folder, **usual | options)


def weights(daemon: Daemon, job_id: str) -> dict[str, torch.Tensor]:
    return load_file(daemon.home.runs / job_id / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_job_that_is_killed_twice_ends_with_the_weights_of_an_uninterrupted_run(
    sturdy: Daemon, tmp_path: Path
):
    straight = sturdy.client.submit(spec(tmp_path))
    killed = sturdy.client.submit(spec(tmp_path))
    assert sturdy.wait(straight)["result"]["steps"] == 30
    for execution, step in ((1, 6), (2, 17)):

        def reached(execution: int = execution, step: int = step) -> dict[str, Any] | None:
            started = sturdy.events(killed, "started")
            steps = [event["step"] for event in sturdy.events(killed, "step")]
            saved = [event["execution"] for event in sturdy.events(killed, "checkpoint")]
            is_there = execution in saved and max(steps, default=0) >= step
            return started[-1] if is_there and len(started) == execution else None

        os.kill(wait_until(reached, timeout_s=90)["pid"], signal.SIGKILL)
    job = sturdy.wait(killed, timeout_s=120)
    assert (job["status"], job["execution"]) == ("finished", 3)
    resumed = [event["resumed_from"] for event in sturdy.events(killed, "begin")]
    assert resumed[0] is None
    assert all(resumed[1:])
    ours, theirs = weights(sturdy, killed), weights(sturdy, straight)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    results = [sturdy.client.job(job_id)["result"] for job_id in (straight, killed)]
    assert results[0]["eval_after"] == results[1]["eval_after"]


@pytest.mark.slow
def test_a_job_begins_with_the_weights_of_another(sturdy: Daemon, tmp_path: Path):
    first = sturdy.client.submit(spec(tmp_path))
    before = sturdy.wait(first)["result"]["eval_after"]
    second = sturdy.client.submit(spec(tmp_path, epochs=1), init=sturdy.client.weights(first))
    assert sturdy.wait(second)["result"]["eval_before"] == before


def test_a_bad_row_is_refused_before_the_job_is_queued(shared_daemon: Daemon, tmp_path: Path):
    path = sft_jobs.write(tmp_path / "bad.jsonl", [{"prompt": "a", "completion": ""}])
    unlocated = SftSpec.parse({"model": "tiny", "dataset": path})
    with pytest.raises(SpecError, match="line 1: completion: must be text, got an empty one"):
        shared_daemon.client.submit(unlocated)
