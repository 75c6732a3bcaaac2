"""Nodes: machines that share a Redis, joining, leaving, dying and being upgraded under jobs."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest
from clusters import Cluster, cluster, kill_tree, other_version, signal_tree
from daemons import gone
from hanging_proxy import HangingProxy
from waiting import wait_until

from warmd.daemon.queue.nodes import Node

pytestmark = pytest.mark.nightly(
    part="networks", catches="a node that leaves with a job, or takes one that it cannot run"
)


@pytest.fixture
def machines(tiny_model: Path) -> Iterator[Cluster]:
    with cluster(tiny_model) as made:
        yield made


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[Cluster]:
    """One cluster for tests that may use the same node, `first`."""
    with cluster(tiny_model) as made:
        yield made


def start_first(shared: Cluster) -> subprocess.Popen[bytes]:
    """Start the node unless it runs; wait until it is ready."""
    if "first" not in shared.nodes or shared.nodes["first"].poll() is not None:
        shared.node("first", "--labels", "gpu=h200")
    shared.wait_ready("first")
    return shared.nodes["first"]


def is_exact(machines: Cluster, job_id: str) -> bool:
    """Whether the job has reported each of its steps once."""
    steps = [event["step"] for event in machines.events(job_id, "step")]
    return bool(steps) and steps == list(range(1, len(steps) + 1))


def test_a_gateway_without_a_worker_is_served_by_the_nodes_of_its_redis(shared: Cluster):
    gateway = shared.node("gateway", "--port", "0", command="gateway")
    wait_until(lambda: "listening on" in shared.log("gateway"), timeout_s=60)
    url = shared.log("gateway").partition("listening on ")[2].split()[0]

    def health() -> int:
        try:
            with urllib.request.urlopen(f"{url}/health") as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert health() == 503
    start_first(shared)
    assert health() == 200
    body = json.dumps({"model": "tiny", "prompt": "1", "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply)["choices"]
    gateway.terminate()
    assert gateway.wait(30) == 0


def test_a_node_runs_its_jobs_to_their_end_when_drained_and_another_takes_the_rest(
    shared: Cluster,
):
    first = start_first(shared)
    running = shared.submit(needs={"gpu": "h200"}, epochs=40)
    shared.wait(running, "started")
    waiting = shared.submit()

    def reported() -> Node | None:
        found = shared.seen("first")
        return found if found is not None and found.jobs else None

    node = wait_until(reported)  # the node's next heartbeat has its jobs
    assert (node.jobs, node.labels["gpu"], node.queues) == (
        [running],
        "h200",
        {"train": 1, "infer": 4},
    )
    shared.client.nodes.drain(node.name)
    shared.node("second", "--queues", "train")
    assert first.wait(90) == 0
    job = shared.wait(running)
    assert (job["status"], job["execution"]) == ("finished", 1)
    assert shared.wait(waiting)["status"] == "finished"
    assert "drained on request" in shared.log("first")
    assert [n.name for n in shared.client.nodes.all()] == [shared.name_of("second")]


@pytest.mark.nightly(
    part="networks", catches="a node of a batch system that does not leave when it is to"
)
def test_a_node_leaves_when_idle_for_long_or_after_its_number_of_jobs(machines: Cluster):
    first = machines.node("first", "--queues", "train", "--max-jobs", "2")
    jobs = [machines.submit() for _ in range(3)]
    assert first.wait(90) == 0
    assert [machines.client.jobs.get(job_id)["status"] for job_id in jobs] == [
        "finished",
        "finished",
        "queued",
    ]
    second = machines.node("second", "--idle-exit", "2s")
    assert second.wait(90) == 0
    assert machines.client.jobs.get(jobs[2])["status"] == "finished"
    assert "took 2 jobs (max_jobs: 2)" in machines.log("first")
    assert "had no job for 2 s (idle_exit)" in machines.log("second")
    assert machines.client.nodes.all() == []


@pytest.mark.nightly(
    part="networks", catches="a job lost when whole nodes fail, or are upgraded one by one"
)
def test_jobs_of_nodes_without_power_or_network_or_time_are_resumed_once_by_another(
    machines: Cluster,
):
    """Three nodes fail at once, as each failure is seen when a lease ends; a fourth resumes all.

    It becomes the leader. A horse that was suspended for longer than the lease writes nothing more,
    and a node that is cut off ends its job before another takes it.
    """
    gate = machines.folder / "gate"
    gate.touch()
    with contextlib.closing(HangingProxy(machines.port)) as network:
        powerless = machines.node("first", "--queues", "train")
        suspended = machines.node("second", "--queues", "train")
        machines.node("third", "--queues", "train", port=network.port)
        machines.wait_ready("first", "second", "third")
        long: dict[str, Any] = {"epochs": 8, "reward": ["behaviours:slow_at_gate"]}
        jobs = [machines.submit(**long) for _ in range(3)]
        for one in jobs:
            wait_until(lambda: len(machines.events(one, "checkpoint")) >= 2, timeout_s=60)  # noqa: B023
        at = {job: node.name for node in machines.client.nodes.all() for job in node.jobs}
        of_suspended, of_cut_off = (
            next(job for job in jobs if at[job] == machines.name_of(name))
            for name in ("second", "third")
        )
        horse_of = {job: psutil.Process(machines.events(job, "started")[0]["pid"]) for job in jobs}
        kill_tree(powerless)
        signal_tree(suspended, signal.SIGSTOP)
        # As on a file system without locks between machines: on one machine they would end the
        # fourth, and it would wait for a checkpoint that the second is in the middle of writing.
        (machines.runs / of_suspended / "lock").rename(
            machines.runs / of_suspended / "lock-of-second"
        )
        for lock in (machines.runs / of_suspended / "checkpoints").glob(".lock*"):
            lock.unlink()
        network.hang()
        machines.node("fourth", "--queues", "train")
        wait_until(lambda: gone(horse_of[of_cut_off]), timeout_s=30)
        assert machines.client.jobs.get(of_cut_off)["execution"] == 1
        gate.unlink()
        for job_id in jobs:
            job = machines.wait(job_id, timeout_s=120)
            assert (job["status"], job["execution"]) == ("finished", 2)
            assert is_exact(machines, job_id)
        fourth, silent = machines.seen("fourth"), machines.seen("first")
        assert fourth is not None
        assert fourth.is_leader
        assert silent is not None
        assert silent.state == "silent"
        network.resume()

        job_id, horse = of_suspended, horse_of[of_suspended]
        result = (machines.runs / job_id / "result.json").read_bytes()
        saved = sorted(path.name for path in (machines.runs / job_id / "checkpoints").iterdir())
        # Its worker would kill it: the late writer is to meet the fence alone.
        horse.resume()
        wait_until(lambda: gone(horse), timeout_s=30)
        assert "superseded by execution 2" in (machines.runs / job_id / "log.txt").read_text()
        signal_tree(suspended, signal.SIGCONT)
        machines.wait_ready("second", "third", "fourth")
        assert (machines.runs / job_id / "result.json").read_bytes() == result
        left = sorted(path.name for path in (machines.runs / job_id / "checkpoints").iterdir())
        assert left == saved
        assert is_exact(machines, job_id)
        assert machines.client.jobs.get(job_id)["status"] == "finished"
        assert "could not renew its lease" in machines.log("third")


@pytest.mark.nightly(
    part="networks", catches="a job lost when whole nodes fail, or are upgraded one by one"
)
def test_a_rolling_upgrade_of_three_nodes_under_jobs_loses_nothing(machines: Cluster):
    later = other_version(machines.folder, "9.9.9", schema=2)
    names = ("first", "second", "third")
    # A job of the later version: nodes of the earlier one refuse it.
    job_id = machines.submit()
    spec = machines.runs / job_id / "spec.json"
    document = {**orjson.loads(spec.read_bytes()), "schema": 2}
    del document["digest"]  # it no longer fits the edited document
    spec.write_bytes(orjson.dumps(document))
    machines.client.connection.hset(f"rq:job:{job_id}", "warmd_needs", "schema=2")
    old = {name: machines.node(name, "--queues", "train") for name in names}
    machines.wait_ready(*names)
    jobs = [machines.submit(epochs=4) for _ in range(9)]
    for name, process in old.items():
        machines.client.nodes.drain(machines.name_of(name))
        assert process.wait(120) == 0
        machines.node(name, "--queues", "train", source=later)
    machines.wait_ready(*names)
    assert {node.version for node in machines.client.nodes.all()} == {"9.9.9"}
    for one in (*jobs, job_id):
        done = machines.wait(one)
        assert (done["status"], done["execution"]) == ("finished", 1), done["error"]
        assert is_exact(machines, one)
    refusals = [name for name in names if "it needs schema=2" in machines.log(name)]
    assert len(refusals) == 1  # set aside once, whatever number of nodes there is
