"""deploy/slurm/node.sbatch in a real Slurm: nodes join, are preempted, requeued and leave."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from clusters import Cluster, cluster
from safetensors.torch import load_file
from slurm import NODES, Slurm, slurm
from waiting import wait_until

pytestmark = pytest.mark.nightly(
    part="slurm",
    catches="signals and requeues that a real Slurm sends and the scripts do not expect",
)

SCRIPT = Path(__file__).parents[2] / "deploy" / "slurm" / "node.sbatch"


@pytest.fixture
def machines(tiny_model: Path) -> Iterator[Cluster]:
    with cluster(tiny_model) as made:
        yield made


@pytest.fixture(scope="module")
def workload() -> Iterator[Slurm]:
    with tempfile.TemporaryDirectory(prefix="warmd-slurm-") as folder, slurm(Path(folder)) as made:
        yield made


def start_node(workload: Slurm, machines: Cluster, *options: str, idle_exit: str = "10m") -> str:
    """Submit node.sbatch as its manual says; return the job's id in Slurm."""
    environ = {
        "WARMD_REDIS_URL": machines.url,
        "WARMD_RUNS": str(machines.runs),
        "WARMD_MODELS": f"tiny={machines.model}",
        "WARMD_WORKERS": "train-0=train,threads=1",
        "WARMD_IDLE_EXIT": idle_exit,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    output = machines.folder / "node-%j.log"
    return workload.submit(SCRIPT, "-o", str(output), *options, **environ)


def output(machines: Cluster, slurm_job: str) -> str:
    path = machines.folder / f"node-{slurm_job}.log"
    return path.read_text() if path.exists() else ""


def weights(machines: Cluster, job_id: str) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(
        machines.runs / job_id / "model" / "model.safetensors"
    )
    return found


def holder(machines: Cluster, job_id: str, candidates: list[str]) -> str:
    """The Slurm job whose node runs a job: its id is in the path of the node's home."""

    def find() -> str | None:
        homes = [node.home for node in machines.client.nodes.all() if job_id in node.jobs]
        return next((own for own in candidates for home in homes if f"warmd-{own}-" in home), None)

    found: str = wait_until(find, timeout_s=60)
    return found


def homes() -> list[Path]:
    return sorted(Path(tempfile.gettempdir()).glob("warmd-[0-9]*-??????"))


def test_a_job_of_a_requeued_node_is_finished_exactly_on_the_other(
    workload: Slurm, machines: Cluster
):
    options: dict[str, Any] = {"epochs": 10, "seed": 3, "reward_timeout": 60}
    nodes = [start_node(workload, machines, f"--nodelist={name}", idle_exit="5s") for name in NODES]
    whole, job_id = machines.submit(**options), machines.submit(**options)
    lost = holder(machines, job_id, nodes)
    wait_until(lambda: machines.events(job_id, "checkpoint"), timeout_s=60)
    # As a preemption without a warning, it signals all processes at once.
    workload.run("scontrol", "requeue", lost)
    job = machines.wait(job_id, timeout_s=120)
    assert (job["status"], job["execution"]) == ("finished", 2), output(machines, lost)
    assert machines.events(job_id, "reward_failed") == []
    steps = [event["step"] for event in machines.events(job_id, "step")]
    assert steps == list(range(1, steps[-1] + 1))
    machines.wait(whole)
    assert machines.client.jobs.get(whole)["execution"] == 1
    one, other = weights(machines, whole), weights(machines, job_id)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert workload.state(lost)[0] == "PENDING"  # it comes back
    (other_node,) = set(nodes) - {lost}
    wait_until(lambda: workload.state(other_node)[0] == "COMPLETED", timeout_s=60)
    assert "had no job for 5 s (idle_exit)" in output(machines, other_node)
    assert homes() == []
    assert machines.client.nodes.all() == []
    workload.run("scancel", lost)


def test_a_preempted_node_comes_back_and_a_canceled_one_does_not(
    workload: Slurm, machines: Cluster
):
    job_id = machines.submit(epochs=200)
    first = start_node(workload, machines, "--nodelist=n1")
    wait_until(lambda: machines.events(job_id, "checkpoint"), timeout_s=120)
    wish = ["sbatch", "--parsable", "-p", "high", "--nodelist=n1", "--exclusive", "-o", "/dev/null"]
    urgent = workload.run(*wish, "--wrap", "sleep 1").strip()
    wait_until(lambda: workload.state(urgent)[0] in ("RUNNING", "COMPLETED"), timeout_s=60)
    # It was warned and had the time to save; its end is not taken for the end of its work.
    assert machines.client.jobs.get(job_id)["status"] == "queued"
    assert "supervisor: stopping (drain)" in output(machines, first)
    wait_until(lambda: workload.state(first)[0] == "PENDING", timeout_s=30)
    assert homes() == []

    wait_until(lambda: workload.state(urgent)[0] == "COMPLETED", timeout_s=60)
    workload.run("scontrol", "update", f"JobId={first}", "StartTime=now")
    machines.wait(job_id, "started", timeout_s=120)
    workload.run("scancel", first)
    machines.wait(job_id, "queued", timeout_s=60)
    wait_until(lambda: workload.state(first)[0] == "CANCELLED", timeout_s=60)
    assert homes() == []
    assert machines.client.nodes.all() == []
