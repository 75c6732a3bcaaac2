"""Preference optimization by a real daemon: killed, paused, branched from; and over HTTP."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import dpo_jobs
import openai
import orjson
import pytest
import sft_jobs
import torch
from daemons import Daemon
from gateways import openai_client
from safetensors.torch import load_file
from shell import warmd
from waiting import wait_until

from warmd.jobs.dpo.options import REWARDS, DpoSpec
from warmd.jobs.errors import SpecError


def spec(folder: Path, **options: Any) -> DpoSpec:
    usual: dict[str, Any] = {
        "model": "tiny",
        "epochs": 6,
        "save_every": 4,
        "eval_samples": 4,
        "eval_every": 10,
    }
    return dpo_jobs.spec(folder, **usual | options)


def weights(daemon: Daemon, job_id: str) -> dict[str, torch.Tensor]:
    return load_file(daemon.home.runs / job_id / "model" / "model.safetensors")


@pytest.mark.slow
def test_a_job_that_is_killed_and_paused_ends_with_the_weights_of_an_uninterrupted_run(
    sturdy: Daemon, tmp_path: Path
):
    straight = sturdy.client.jobs.submit(spec(tmp_path))
    killed = sturdy.client.jobs.submit(spec(tmp_path))
    assert sturdy.wait(straight)["result"]["steps"] == 30
    for execution, step in ((1, 6), (2, 17)):

        def reached(execution: int = execution, step: int = step) -> dict[str, Any] | None:
            started = sturdy.events(killed, "started")
            steps = [event["step"] for event in sturdy.events(killed, "step")]
            saved = [event["execution"] for event in sturdy.events(killed, "checkpoint")]
            is_there = execution in saved and max(steps, default=0) >= step
            return started[-1] if is_there and len(started) == execution else None

        os.kill(wait_until(reached, timeout_s=90)["pid"], signal.SIGKILL)
    wait_until(lambda: len(sturdy.events(killed, "begin")) == 3, timeout_s=90)
    sturdy.client.jobs.pause(killed)
    wait_until(lambda: sturdy.events(killed, "paused"), timeout_s=90)
    sturdy.client.jobs.unpause(killed)
    job = sturdy.wait(killed, timeout_s=120)
    assert (job["status"], job["execution"]) == ("finished", 3)
    resumed = [event["resumed_from"] for event in sturdy.events(killed, "begin")]
    assert resumed[0] is None
    assert all(resumed[1:])
    ours, theirs = weights(sturdy, killed), weights(sturdy, straight)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    results = [sturdy.client.jobs.get(job_id)["result"] for job_id in (straight, killed)]
    assert results[0]["eval_after"] == results[1]["eval_after"]


@pytest.mark.slow
def test_the_reference_is_the_model_that_the_job_begins_with(sturdy: Daemon, tmp_path: Path):
    first = sturdy.client.jobs.submit(sft_jobs.spec(tmp_path, model="tiny"))
    sturdy.wait(first)
    second = sturdy.client.jobs.submit(
        spec(tmp_path, epochs=1), init=sturdy.client.models.weights(first)
    )
    before = sturdy.wait(second)["result"]["eval_before"]
    assert [before[name] for name in REWARDS] == [0, 0, 0, 0]


def test_a_bad_pair_is_refused_before_the_job_is_queued(shared_daemon: Daemon, tmp_path: Path):
    path = sft_jobs.write(tmp_path / "bad.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "b"}])
    unlocated = DpoSpec.parse({"model": "tiny", "dataset": path})
    with pytest.raises(SpecError, match="line 1: rejected: must be another completion than chosen"):
        shared_daemon.client.jobs.submit(unlocated)


@pytest.mark.slow
def test_a_dry_run_counts_pairs_and_steps(shared_daemon: Daemon, tmp_path: Path):
    path = sft_jobs.write(tmp_path / "pairs.jsonl", dpo_jobs.ROWS["texts"])
    words = ("--model", "tiny", "--batch-size", "4", "--eval-samples", "2", "--dry-run")
    done = warmd("submit", "dpo", path, *words, home=shared_daemon.home.path)
    assert done.code == 0, done.err
    plan = done.out + done.err
    assert f"12 of {path}, 1 epoch\n" in plan
    assert "for weights, gradients and AdamW" in plan


@pytest.fixture
def client(shared_daemon: Daemon) -> Any:
    url: str = wait_until(lambda: shared_daemon.status()["http"]["url"])
    with openai_client(url) as made:
        yield made


def preferences(number: int) -> dict[str, Any]:
    return {
        "input": {"messages": [{"role": "user", "content": f"{number}+1="}]},
        "preferred_output": [{"role": "assistant", "content": f"{number + 1}"}],
        "non_preferred_output": [{"role": "assistant", "content": "no idea"}],
    }


def upload(client: Any, rows: list[dict[str, Any]]) -> str:
    content = b"\n".join(map(orjson.dumps, rows))
    made = client.files.create(file=("rows.jsonl", content), purpose="fine-tune")
    return str(made.id)


def texts(number: int) -> dict[str, str]:
    return {"prompt": f"{number}+1=", "chosen": f"{number + 1}", "rejected": "no idea"}


def test_openais_preference_request_trains(shared_daemon: Daemon, client: Any):
    train, held_out = (upload(client, [texts(n) for n in part]) for part in (range(8), range(3)))
    hyperparameters = {
        **{"beta": 0.2, "n_epochs": 1, "batch_size": 4},
        "learning_rate_multiplier": "auto",
    }
    job = client.fine_tuning.jobs.create(
        model="tiny",
        training_file=train,
        validation_file=held_out,
        method={"type": "dpo", "dpo": {"hyperparameters": hyperparameters}},
    )
    assert (job.method.type, job.validation_file) == ("dpo", held_out)
    assert job.method.dpo.hyperparameters.beta == 0.2
    assert shared_daemon.wait(job.id)["result"]["eval_after"]["n"] == 3
    events = client.fine_tuning.jobs.list_events(job.id).data
    steps = [
        event.data for event in events if event.data.get("steps_total") and "loss" in event.data
    ]
    assert len(steps) == 2
    assert steps[0]["rewards/margins"] > 0


def test_an_unusable_preference_request_is_refused_by_field(client: Any):
    bad = {**preferences(1), "non_preferred_output": preferences(1)["preferred_output"]}
    for rows, hyperparameters, message in (
        ([bad], {}, "line 1: non_preferred_output: must be another completion than"),
        ([preferences(1)], {}, "chat_template: the tokenizer of this model has none"),
        ([texts(1)], {"beta": 0}, "method.dpo.hyperparameters.beta: must be a number above 0"),
        ([texts(1)], {"eval_dataset": "/etc/passwd"}, "not an option of dpo over HTTP"),
        ([texts(1)], {"learning_rate_multiplier": 2}, "must be 'auto', got 2"),
    ):
        method = {"type": "dpo", "dpo": {"hyperparameters": hyperparameters}}
        with pytest.raises(openai.BadRequestError) as refused:
            client.fine_tuning.jobs.create(
                model="tiny", training_file=upload(client, rows), method=method
            )
        assert message in str(refused.value)
