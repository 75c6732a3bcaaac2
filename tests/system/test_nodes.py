"""Nodes: machines that share a Redis, joining, leaving, dying and being upgraded under jobs."""

from __future__ import annotations

import contextlib
import json
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import orjson
import psutil
import pytest
from clusters import Cluster, cluster, kill_tree, other_version, signal_tree
from daemons import gone
from hanging_proxy import HangingProxy
from waiting import wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def machines(tiny_model: Path) -> Iterator[Cluster]:
    with cluster(tiny_model) as made:
        yield made


def is_exact(machines: Cluster, job_id: str) -> bool:
    """Whether the job has reported each of its steps once."""
    steps = [event["step"] for event in machines.events(job_id, "step")]
    return bool(steps) and steps == list(range(1, len(steps) + 1))


def test_a_node_runs_its_jobs_to_their_end_when_drained_and_another_takes_the_rest(
    machines: Cluster,
):
    first = machines.node("first", "--labels", "gpu=h200")
    machines.wait_ready("first")
    running = machines.submit(needs={"gpu": "h200"}, epochs=40)
    machines.wait(running, "started")
    waiting = machines.submit()
    node = machines.seen("first")
    assert node is not None
    assert (node.jobs, node.labels["gpu"], node.queues) == (
        [running],
        "h200",
        {"train": 1, "infer": 4},
    )
    machines.client.drain(node.name)
    machines.node("second", "--queues", "train")
    assert first.wait(90) == 0
    job = machines.wait(running)
    assert (job["status"], job["execution"]) == ("finished", 1)
    assert machines.wait(waiting)["status"] == "finished"
    assert "drained on request" in machines.log("first")
    assert [n.name for n in machines.client.nodes()] == [machines.name_of("second")]


def test_a_node_leaves_when_idle_for_long_or_after_its_number_of_jobs(machines: Cluster):
    first = machines.node("first", "--queues", "train", "--max-jobs", "2")
    jobs = [machines.submit() for _ in range(3)]
    assert first.wait(90) == 0
    assert [machines.client.job(job_id)["status"] for job_id in jobs] == [
        "finished",
        "finished",
        "queued",
    ]
    second = machines.node("second", "--idle-exit", "2s")
    assert second.wait(90) == 0
    assert machines.client.job(jobs[2])["status"] == "finished"
    assert "took 2 jobs (max_jobs: 2)" in machines.log("first")
    assert "had no job for 2 s (idle_exit)" in machines.log("second")
    assert machines.client.nodes() == []


def test_a_gateway_without_a_worker_is_served_by_the_nodes_of_its_redis(machines: Cluster):
    machines.node("gateway", "--port", "0", command="gateway")
    wait_until(lambda: "listening on" in machines.log("gateway"), timeout_s=60)
    url = machines.log("gateway").partition("listening on ")[2].split()[0]

    def health() -> int:
        try:
            with urllib.request.urlopen(f"{url}/health") as reply:
                return int(reply.status)
        except urllib.error.HTTPError as error:
            return error.code

    assert health() == 503
    machines.node("first", "--queues", "infer")
    machines.wait_ready("first")
    assert health() == 200
    body = json.dumps({"model": "tiny", "prompt": "1", "max_tokens": 2}).encode()
    request = urllib.request.Request(
        f"{url}/v1/completions", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply)["choices"]


def test_another_node_resumes_the_jobs_of_a_node_that_lost_power_and_becomes_leader(
    machines: Cluster,
):
    first = machines.node("first", "--queues", "train")
    machines.wait_ready("first")
    job_id = machines.submit(epochs=8)
    wait_until(lambda: len(machines.events(job_id, "checkpoint")) >= 2, timeout_s=60)
    machines.node("second", "--queues", "train")
    kill_tree(first)
    job = machines.wait(job_id)
    assert (job["status"], job["execution"]) == ("finished", 2)
    assert is_exact(machines, job_id)
    second = machines.seen("second")
    assert second is not None
    assert second.is_leader
    silent = machines.seen("first")
    assert silent is not None
    assert silent.state == "silent"


def test_a_horse_that_was_suspended_for_longer_than_the_lease_writes_nothing_more(
    machines: Cluster,
):
    first = machines.node("first", "--queues", "train")
    machines.wait_ready("first")
    job_id = machines.submit(epochs=8)
    wait_until(lambda: len(machines.events(job_id, "checkpoint")) >= 2, timeout_s=60)
    signal_tree(first, signal.SIGSTOP)
    # As on a file system without locks between machines: on one machine they would end the first,
    # and the second would wait for a checkpoint that the first is in the middle of writing.
    (machines.runs / job_id / "lock").rename(machines.runs / job_id / "lock-of-first")
    for lock in (machines.runs / job_id / "checkpoints").glob(".lock*"):
        lock.unlink()
    machines.node("second", "--queues", "train")
    job = machines.wait(job_id)
    assert (job["status"], job["execution"]) == ("finished", 2)
    result = (machines.runs / job_id / "result.json").read_bytes()
    saved = sorted(path.name for path in (machines.runs / job_id / "checkpoints").iterdir())
    # Its worker would kill it: the late writer is to meet the fence alone.
    horse = psutil.Process(machines.events(job_id, "started")[0]["pid"])
    horse.resume()
    wait_until(lambda: gone(horse), timeout_s=30)
    assert "superseded by execution 2" in (machines.runs / job_id / "log.txt").read_text()
    signal_tree(first, signal.SIGCONT)
    machines.wait_ready("first")
    assert (machines.runs / job_id / "result.json").read_bytes() == result
    left = sorted(path.name for path in (machines.runs / job_id / "checkpoints").iterdir())
    assert left == saved
    assert is_exact(machines, job_id)
    assert machines.client.job(job_id)["status"] == "finished"


def test_a_node_that_is_cut_off_ends_its_jobs_before_another_takes_them(machines: Cluster):
    with contextlib.closing(HangingProxy(machines.port)) as network:
        machines.node("first", "--queues", "train", port=network.port)
        machines.wait_ready("first")
        job_id = machines.submit(epochs=60)
        wait_until(lambda: len(machines.events(job_id, "checkpoint")) >= 2, timeout_s=60)
        horse = psutil.Process(machines.events(job_id, "started")[0]["pid"])
        network.hang()
        machines.node("second", "--queues", "train")
        wait_until(lambda: gone(horse), timeout_s=30)
        assert machines.client.job(job_id)["execution"] == 1
        wait_until(lambda: machines.client.job(job_id)["execution"] == 2, timeout_s=60)
        network.resume()
        done = machines.wait(job_id, timeout_s=120)
        assert (done["status"], done["execution"]) == ("finished", 2)
        assert is_exact(machines, job_id)
        machines.wait_ready("first", "second")
        assert "could not renew its lease" in machines.log("first")


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
        machines.client.drain(machines.name_of(name))
        assert process.wait(120) == 0
        machines.node(name, "--queues", "train", source=later)
    machines.wait_ready(*names)
    assert {node.version for node in machines.client.nodes()} == {"9.9.9"}
    for one in (*jobs, job_id):
        done = machines.wait(one)
        assert (done["status"], done["execution"]) == ("finished", 1), done["error"]
        assert is_exact(machines, one)
    refusals = [name for name in names if "it needs schema=2" in machines.log(name)]
    assert len(refusals) == 1  # set aside once, whatever number of nodes there is
