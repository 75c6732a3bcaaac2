"""All training kinds, sweeps and curricula on two nodes; a drain and a restart of Redis."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import dpo_jobs
import mlm_jobs
import pytest
import sft_jobs
import torch
from clusters import Cluster, cluster
from gangs import SETTINGS, are_equal, run_nodes, submit_sft
from safetensors.torch import load_file
from waiting import wait_until

from warmd.daemon.client.client import Client

pytestmark = pytest.mark.nightly(
    part="networks",
    catches="a kind, sweep or curriculum whose steps differ on two nodes",
)


@pytest.fixture(scope="module")
def machines(tiny_model: Path) -> Iterator[Cluster]:
    """One cluster for all tests."""
    with cluster(tiny_model) as made:
        made.settings = dict(SETTINGS)
        yield made


@pytest.fixture
def folder(machines: Cluster, tmp_path: Path) -> Path:
    """An empty folder, while two nodes run."""
    run_nodes(machines, "a", "b")
    return tmp_path


def final_weights(machines: Cluster, job_id: str) -> dict[str, torch.Tensor]:
    """The tensors that a job has trained, of the model or of its adapter."""
    [path] = machines.runs.joinpath(job_id).glob("model/*model.safetensors")
    return load_file(path)


@pytest.mark.parametrize("kind", ["sft with LoRA", "dpo", "mlm"])
def test_each_kind_trains_the_weights_of_two_processes_on_one_node(
    machines: Cluster, folder: Path, kind: str
):
    def submit(**options: Any) -> str:
        if kind == "mlm":
            return machines.client.jobs.submit(mlm_jobs.text_spec(folder, **options))
        if kind == "dpo":
            return machines.client.jobs.submit(
                dpo_jobs.spec(folder, model="tiny", epochs=1, **options)
            )
        spec = sft_jobs.spec(folder, model="tiny", epochs=2, lora=4, **options)
        return machines.client.jobs.submit(spec)

    if kind == "mlm":
        mlm_jobs.make_home(folder)
    found = []
    for options in ({"nodes": 2}, {"processes": 2}):
        job_id = submit(**options)
        assert machines.wait(job_id)["status"] == "finished", machines.events(job_id, "failed")
        found.append(final_weights(machines, job_id))
    together, alone = found
    assert together.keys() == alone.keys()
    assert all(torch.equal(together[name], alone[name]) for name in alone)


def test_the_jobs_of_sweeps_and_curricula_run_on_two_nodes(machines: Cluster, folder: Path):
    config = replace(machines.client.config, home=machines.home("a").path)
    data = sft_jobs.write(folder / "rows.jsonl", sft_jobs.ROWS["prompt and completion"])
    values = {"model": "tiny", "dataset": data, "batch_size": "2", "nodes": "2"}
    with closing(Client(config)) as client:
        swept = client.groups.submit_sweep(
            "sft", values, {"sweep": {"learning_rate": ["1e-3", "1e-2"]}}
        )
        members = client.groups.sweep_members(swept)
        taught = client.groups.submit_curriculum(
            "sft", values, {"stages": [{"samples": 4}, {"samples": 8}]}
        )
        wait_until(lambda: client.groups.curriculum(taught)["status"] == "finished", timeout_s=90)
        jobs = [*members, *client.groups.members(taught)]
    assert len(jobs) == 4
    for job_id in jobs:
        assert machines.wait(job_id)["status"] == "finished", machines.events(job_id, "failed")
        [started] = machines.events(job_id, "started")
        assert len(started["nodes"]) == 2


def test_a_restart_of_redis_does_not_end_the_job(machines: Cluster, folder: Path):
    job_id = submit_sft(machines, epochs=60)
    wait_until(lambda: len(machines.events(job_id, "step")) > 3, timeout_s=60)
    machines.kill_redis()
    at = len(machines.events(job_id, "step"))
    wait_until(lambda: len(machines.events(job_id, "step")) > at + 3, timeout_s=30)
    machines.start_redis()
    assert machines.wait(job_id)["status"] == "finished"
    straight = submit_sft(machines, epochs=60, nodes=1, processes=2)
    assert machines.wait(straight)["status"] == "finished"
    assert len(machines.events(job_id, "started")) == 1
    assert are_equal(machines, job_id, straight)


def test_a_node_that_is_drained_keeps_its_part_until_the_job_ends(machines: Cluster, folder: Path):
    job_id = submit_sft(machines, epochs=40)
    wait_until(lambda: len(machines.events(job_id, "step")) > 3, timeout_s=60)
    follower = machines.events(job_id, "started")[-1]["nodes"][1]
    machines.client.nodes.drain(follower)
    [leaving] = [one for name, one in machines.nodes.items() if machines.name_of(name) == follower]
    waits = submit_sft(machines)
    assert machines.wait(job_id)["status"] == "finished"
    assert len(machines.events(job_id, "started")) == 1
    assert leaving.wait(timeout=60) == 0
    job = machines.client.jobs.get(waits)
    assert (job["status"], job["execution"]) == ("queued", 0)
    run_nodes(machines, "a", "b")
    assert machines.wait(waits)["status"] == "finished"
