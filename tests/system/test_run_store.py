"""Nodes with disks of their own and run directories in a bucket."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import Cluster, cluster, kill_tree
from s3_servers import KEYS, S3Server, s3_server
from safetensors.torch import load_file
from waiting import wait_until

from warmd.daemon.host.machine import machine_name
from warmd.daemon.runs import events
from warmd.daemon.runs.rundir import RunDir
from warmd.daemon.store import index
from warmd.daemon.store.bucket import Bucket
from warmd.jobs.models.adapters import is_model

pytestmark = pytest.mark.nightly(
    part="networks", catches="a job that continues on another disk with other weights"
)


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as made:
        yield made


@pytest.fixture
def machines(tiny_model: Path, tmp_path: Path, server: S3Server) -> Iterator[Cluster]:
    with cluster(tiny_model, server.url(tmp_path.name)) as made:
        yield made


@pytest.fixture(scope="module")
def pair(tiny_model: Path, server: S3Server) -> Iterator[Cluster]:
    """A node of each queue, for all tests that leave them so."""
    with cluster(tiny_model, server.url("pair")) as made:
        made.node("deciding", "--queues", "infer")
        made.node("training", "--queues", "train")
        made.wait_ready("deciding", "training")
        yield made


def weights_of(cluster: Cluster, job_id: str) -> dict[str, torch.Tensor]:
    cluster.client.models.fetch_weights(job_id, final=True)
    return load_file(cluster.client.rundir(job_id).path / "model" / "model.safetensors")


@pytest.mark.nightly(
    part="storms", catches="a checkpoint in the bucket from which another machine cannot resume"
)
def test_a_job_of_a_node_that_lost_power_ends_on_another_disk_with_the_same_weights(
    machines: Cluster,
):
    options: dict[str, Any] = {"epochs": 8, "save_every": 3}
    first = machines.node("first", "--queues", "train")
    machines.wait_ready("first")
    straight = machines.submit(**options)
    assert machines.wait(straight)["status"] == "finished"
    job_id = machines.submit(**options)
    remote = machines.client.remote
    assert remote is not None
    wait_until(lambda: index.read(remote.bucket, job_id).checkpoints(), timeout_s=60)
    kill_tree(first)
    machines.node("second", "--queues", "train")
    job = machines.wait(job_id)
    assert (job["status"], job["execution"]) == ("finished", 2)
    steps = [event["step"] for event in machines.events(job_id, "step")]
    assert steps == list(range(1, job["steps_total"] + 1))
    one, other = weights_of(machines, straight), weights_of(machines, job_id)
    assert all(torch.equal(one[name], other[name]) for name in one)
    is_read_and_removed_from_anywhere(machines, straight, job_id)
    for path in machines.folder.rglob("*"):
        if path.is_file():
            assert KEYS["AWS_SECRET_ACCESS_KEY"].encode() not in path.read_bytes(), path


def at_a_desk(
    machines: Cluster, *command: str, home: str = "desk", code: int = 0
) -> subprocess.CompletedProcess[str]:
    """Run a command on a machine that has Redis and the store only."""
    environ = {
        **os.environ,
        "WARMD_HOME": str(machines.home(home).path),
        "WARMD_REDIS_URL": machines.url,
        "WARMD_RUNS": str(machines.run_store),
    }
    done = subprocess.run(
        [sys.executable, "-m", "warmd.cli", *command],
        env=environ,
        capture_output=True,
        text=True,
        cwd=machines.folder,
    )
    assert done.returncode == code, done.stderr
    return done


def is_read_and_removed_from_anywhere(machines: Cluster, straight: str, job_id: str) -> None:
    """What commands show on a machine that has Redis and the store only."""

    def run(*command: str) -> str:
        return at_a_desk(machines, *command).stdout

    assert {job_id, straight} <= {line.split()[0] for line in run("jobs").splitlines() if line}
    here = machines.client.jobs.result(job_id)
    assert here is not None
    assert json.loads(run("result", job_id, "--json"))["steps"] == here["steps"]
    assert json.loads(run("show", job_id, "--json"))["execution"] == 2
    tailed = [json.loads(line) for line in run("tail", job_id, "--json").splitlines()]
    steps = [event["step"] for event in tailed if event["type"] == "step"]
    assert steps == list(range(1, len(steps) + 1))
    listed = [json.loads(row) for row in run("checkpoints", "list", job_id, "--json").splitlines()]
    assert len(listed) == 3
    assert all(row["error"] is None and row["bytes"] > 10_000 for row in listed)
    run("checkpoints", "export", job_id, "exported", "--step", str(listed[0]["step"]))
    assert is_model(machines.folder / "exported")
    run("show", job_id, "--note", "seen from the desk")
    machines.client.rundir(job_id)
    assert [note.text for note in machines.client.jobs.labels(job_id).notes] == [
        "seen from the desk"
    ]
    run("rm", job_id)
    remote = machines.client.remote
    assert remote is not None
    assert remote.ids() == [straight]
    assert list(remote.bucket.sizes(job_id)) == []


@pytest.mark.nightly(
    part="storms", catches="a training that ends before its last files are in the bucket"
)
def test_a_training_continues_while_the_store_is_away_and_ends_when_it_is_durable(
    machines: Cluster, server: S3Server
):
    elsewhere = machines.folder / "model"
    shutil.copytree(machines.model, elsewhere)
    lacking = machines.submit(model=str(elsewhere))
    shutil.rmtree(elsewhere)  # as on a machine that never had it
    machines.node("first", "--queues", "train")
    machines.wait_ready("first")
    wait_until(lambda: machines.client.jobs.get(lacking)["missing_model"] == str(elsewhere))
    shutil.copytree(machines.model, elsewhere)
    assert machines.wait(lacking)["status"] == "finished"
    (requeued,) = machines.events(lacking, "requeued")
    assert f"{machine_name()} has no model folder {elsewhere}" in requeued["reason"]
    job_id = machines.submit(epochs=8, save_every=3)
    machines.wait(job_id, "started")
    rundir = RunDir(machines.home("first").runs / job_id)
    wait_until(lambda: list(rundir.checkpoints.glob("checkpoint-*")), timeout_s=60)
    server.proxy.cut()
    try:
        wait_until(lambda: rundir.read_result() is not None, timeout_s=90)

        def warnings() -> list[str]:
            found = events.read(rundir.events)
            return [event["message"] for event in found if event["type"] == "warning"]

        wait_until(warnings, timeout_s=30)
        waiting = machines.client.store.fetch(job_id)
        assert waiting is not None
        assert waiting.get_status() == "started"
    finally:
        server.proxy.restore()
    job = machines.wait(job_id)
    assert (job["status"], job["execution"]) == ("finished", 1)
    assert len(warnings()) == 1
    bucket = Bucket(str(machines.run_store))
    assert f"run store {bucket.name}: " in warnings()[0]
    stored = index.read(bucket, job_id)
    assert {"result.json", "model/model.safetensors"} <= stored.files.keys()
    reported = [event["step"] for event in machines.events(job_id, "step")]
    assert reported == list(range(1, job["steps_total"] + 1))
    assert machines.log("first").count("uploads are retried") == 1
    # The uploader reports it in its next iteration: the end of the job does not wait for that.
    wait_until(lambda: machines.log("first").count("can be written again") == 1)


def test_the_model_of_a_job_is_fetched_by_the_nodes_that_use_it(pair: Cluster):
    job_id = pair.submit()
    assert pair.wait(job_id)["status"] == "finished"
    prompt = ("submit", "infer", "--prompt", "1", "--max-tokens", "2", "--model", job_id)
    answered = at_a_desk(pair, *prompt, "--wait")
    assert f"fetching the model of {job_id}: " in answered.stderr
    again = at_a_desk(pair, *prompt, "--wait")
    assert "fetching the model of" not in again.stderr
    assert is_model(pair.home("deciding").runs / job_id / "model")


def test_a_sweep_is_trained_pruned_and_cleaned_up_with_a_bucket(pair: Cluster):
    remote = pair.client.remote
    assert remote is not None
    before = set(remote.ids())
    data = pair.folder / "sums.jsonl"
    data.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)))
    options = ("--dataset", str(data), "--samples", "4", "--max-completion-length", "4")
    at_a_desk(
        pair,
        *("submit", "grpo", "--model", str(pair.model), *options, "--save-every", "1"),
        *("--num-generations", "2", "--keep", "3", "--sweep", "learning_rate=1e-5,1e-6", "--wait"),
    )
    swept = sorted(set(remote.ids()) - before)
    assert len(swept) == 2
    assert len(index.read(remote.bucket, swept[0]).checkpoints()) > 1
    at_a_desk(pair, "checkpoints", "prune", swept[0], "--keep", "1", "--yes")
    assert len(index.read(remote.bucket, swept[0]).checkpoints()) == 1
    at_a_desk(pair, "rm", "--older-than", "1s", "--keep-models")
    assert set(swept) <= set(remote.ids())
    assert not index.read(remote.bucket, swept[0]).checkpoints()
    assert index.read(remote.bucket, swept[0]).below("model")
    at_a_desk(pair, "rm", "--older-than", "1s")
    assert remote.ids() == []


@pytest.mark.nightly(
    part="storms",
    catches="a sweep or curriculum that does not see what another machine has put into the bucket",
)
def test_groups_continue_by_what_other_machines_have_put_into_the_bucket(pair: Cluster):
    data = pair.folder / "sums.jsonl"
    data.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)))
    plan = {
        "dataset": str(data),
        "max_completion_length": 4,
        "num_generations": 2,
        "gate": {"dataset": str(data), "samples": 4, "most_samples": 8, "max_tokens": 2},
        "stages": [{"name": "one", "samples": 4}, {"name": "two", "samples": 4}],
    }
    (pair.folder / "plan.yaml").write_text(json.dumps(plan))
    grpo = ("submit", "grpo", "--model", str(pair.model), "--wait")
    at_a_desk(pair, *grpo, "--config", "plan.yaml", "--name", "stages", home="deciding")
    shown = json.loads(at_a_desk(pair, "show", "stages", "--json", home="deciding").stdout)
    assert shown["status"] == "finished"
    assert [attempt["decision"] for attempt in shown["attempts"]] == ["continue", "continue"]
    options = ("--dataset", str(data), "--max-completion-length", "4", "--num-generations", "2")
    rates = ("--sweep", "learning_rate=1e-6,1e-5,1e-4", "--halving", "3", "--samples", "6")
    at_a_desk(pair, *grpo, *options, *rates, "--name", "rates", home="deciding")
    swept = json.loads(at_a_desk(pair, "show", "rates", "--json", home="deciding").stdout)
    assert swept["status"] == "finished"
    steps = sorted(point["step"] for point in swept["points"])
    assert steps[0] == steps[1] < steps[2]
    assert all(point["n"] == 1 for point in swept["points"])
    # A model of the curriculum is used by machines that have not trained it.
    last = shown["attempts"][-1]["job"]
    few = ("--samples", "4", "--max-tokens", "2")
    at_a_desk(pair, "eval", last, "--dataset", str(data), *few)
    at_a_desk(pair, "load", last, home="deciding")


def test_a_curriculum_is_refused_in_a_home_without_a_daemon(machines: Cluster):
    data = machines.folder / "sums.jsonl"
    data.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n + 1}"}}\n' for n in range(8)))
    stages = [{"name": "one", "samples": 4}, {"name": "two", "samples": 4}]
    plan = {"dataset": str(data), "max_completion_length": 4, "stages": stages}
    (machines.folder / "plan.yaml").write_text(json.dumps(plan))
    model = ("--model", str(machines.model), "--num-generations", "2")
    done = at_a_desk(machines, "submit", "grpo", *model, "--config", "plan.yaml", code=3)
    assert "curriculum: the daemon of this home decides how it continues" in done.stderr
    assert machines.client.remote is not None
    assert machines.client.remote.ids() == []
