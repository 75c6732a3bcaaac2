"""Jobs of several nodes: gathered all at once or not, exact, and ended as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import redis
import torch
from clusters import Cluster, cluster, kill_tree, other_version
from daemons import gone
from gangs import SETTINGS, are_equal, horses, run_nodes, seats, submit_sft, weights
from rq import suspension
from waiting import wait_until

from warmd.daemon.queue import keys
from warmd.daemon.queue.gangs import Gang, Gangs

pytestmark = pytest.mark.nightly(
    part="networks", catches="a job of several nodes that loses a part, or steps with too few"
)


@pytest.fixture(scope="module")
def machines(tiny_model: Path) -> Iterator[Cluster]:
    """One cluster for all tests, each of which chooses the running nodes (run_nodes)."""
    with cluster(tiny_model) as made:
        made.settings = dict(SETTINGS)
        yield made


@pytest.fixture(scope="module")
def straight(machines: Cluster) -> str:
    """A job that two nodes have run without interruption."""
    nodes = run_nodes(machines, "a", "b")
    job_id = submit_sft(machines)
    assert machines.wait(job_id)["status"] == "finished", machines.events(job_id, "failed")
    [started] = machines.events(job_id, "started")
    assert sorted(started["nodes"]) == sorted(nodes)
    return job_id


def steps(machines: Cluster, job_id: str) -> list[int]:
    return [event["step"] for event in machines.events(job_id, "step")]


def reached(machines: Cluster, job_id: str, step: int) -> bool:
    started = len(machines.events(job_id, "started"))
    return any(
        e["execution"] == started and e["step"] >= step for e in machines.events(job_id, "step")
    )


def horses_of(nodes: dict[str, subprocess.Popen[bytes]], *names: str) -> list[psutil.Process]:
    return [one for name in names for one in horses(psutil.Process(nodes[name].pid))]


@pytest.mark.nightly(
    part="storms",
    catches="a job of several nodes that starts on two versions or holds up the queue",
)
def test_a_job_waits_for_enough_nodes_of_one_version_and_lets_others_pass(machines: Cluster):
    run_nodes(machines, "a")
    later = other_version(machines.folder, "9.9.9", schema=2)
    upgraded = machines.node("upgraded", source=later)
    waits = submit_sft(machines)
    for _ in range(2):
        assert machines.wait(machines.submit(samples=2))["status"] == "finished"
    machines.wait_ready("a", "upgraded")
    # Now there are two, and both are idle.
    for _ in range(2):
        assert machines.wait(machines.submit(samples=2))["status"] == "finished"
    job = machines.client.jobs.get(waits)
    assert (job["status"], job["execution"]) == ("queued", 0)
    assert job["awaited_nodes"] == "2 nodes at once, 1 there"
    machines.node("b")
    assert machines.wait(waits)["status"] == "finished"
    [started] = machines.events(waits, "started")
    assert sorted(started["nodes"]) == sorted(map(machines.name_of, ("a", "b")))
    upgraded.terminate()
    assert upgraded.wait(timeout=60) == 0


def test_two_nodes_train_the_weights_of_two_processes_on_one(machines: Cluster, straight: str):
    nodes = run_nodes(machines, "a", "b")
    alone = submit_sft(machines, nodes=1, processes=2)
    assert machines.wait(alone)["status"] == "finished"
    assert are_equal(machines, straight, alone)
    assert steps(machines, straight) == steps(machines, alone)
    wait_until(lambda: not horses_of(nodes, *nodes))


def test_two_nodes_of_two_processes_train_the_weights_of_four(machines: Cluster):
    run_nodes(machines, "a", "b")
    options: dict[str, Any] = {"prompts_per_step": 2, "samples": 4, "reward": ["behaviours:length"]}
    together = machines.submit(nodes=2, processes=2, **options)
    assert machines.wait(together, timeout_s=120)["status"] == "finished"
    alone = machines.submit(nodes=1, processes=2, **options)
    assert machines.wait(alone, timeout_s=120)["status"] == "finished"
    for name, weight in weights(machines, alone).items():
        torch.testing.assert_close(weights(machines, together)[name], weight)


def test_a_failure_on_one_node_fails_the_job_with_its_message(machines: Cluster):
    run_nodes(machines, "a", "b")
    job_id = machines.submit(nodes=2, prompts_per_step=2, reward=["behaviours:fails_elsewhere"])
    job = machines.wait(job_id, timeout_s=60)
    assert job["status"] == "failed"
    assert "no reward on rank 1 of 2" in job["error"]
    assert len(machines.events(job_id, "failed")) == 1
    assert machines.wait(machines.submit(samples=2))["status"] == "finished"


def test_a_job_that_finds_too_few_free_nodes_in_time_lets_others_pass(machines: Cluster):
    run_nodes(machines, "a", "b")
    long = submit_sft(machines, nodes=1, epochs=400)
    wait_until(lambda: machines.events(long, "step"), timeout_s=60)
    waits = submit_sft(machines)
    wait_until(lambda: machines.client.jobs.get(waits)["awaited_nodes"] == "2 nodes, 1 joined")
    other = machines.submit(samples=2)
    assert machines.wait(other, timeout_s=60)["status"] == "finished"
    [warning] = machines.events(waits, "warning")
    assert "1 of 2 were free within 5 s" in warning["message"]
    assert machines.client.jobs.get(waits)["execution"] == 0
    machines.client.jobs.cancel(long)
    assert machines.wait(waits, timeout_s=60)["status"] == "finished"


@pytest.mark.nightly(
    part="storms",
    catches="a job of several nodes that a suspended worker or a damaged record blocks",
)
def test_a_gathering_survives_suspended_workers_damaged_records_and_killed_leaders(
    machines: Cluster,
):
    nodes = run_nodes(machines, "a", "b")
    connection = machines.client.connection
    long = submit_sft(machines, nodes=1, epochs=2000)
    wait_until(lambda: machines.events(long, "step"), timeout_s=60)
    waits = submit_sft(machines)

    def gathers() -> Gang | None:
        gang = Gangs(connection).gang(waits)
        return gang if gang is not None and gang.is_gathering and gang.is_leader_alive else None

    first: Gang = wait_until(gathers)
    for one in psutil.Process(nodes[first.node].pid).children(recursive=True):
        if any("work.worker" in word for word in one.cmdline()):
            one.kill()
    wait_until(lambda: (gang := gathers()) is not None and gang.token != first.token)
    for field, damage in (("size", "many"), ("seat x", "{")):
        connection.hset(keys.gang(waits), field, damage)
        wait_until(lambda: gathers() and not damaged(connection, waits))
    connection.set(keys.GATHERING, waits)  # without the expiry
    connection.delete(keys.gang(waits))
    wait_until(gathers)
    suspension.suspend(connection)
    machines.client.jobs.cancel(long)
    assert machines.wait(long)["status"] == "stopped"
    # Both are free, until they would have been released.
    wait_until(lambda: gathers() is None, timeout_s=30)
    job = machines.client.jobs.get(waits)
    assert (job["status"], job["execution"]) == ("queued", 0)
    suspension.resume(connection)
    assert machines.wait(waits, timeout_s=60)["status"] == "finished"
    assert len(machines.events(waits, "started")) == 1


def damaged(connection: redis.Redis, job_id: str) -> bool:
    found = connection.hgetall(keys.gang(job_id))
    return found.get(b"size") == b"many" or b"seat x" in found


@pytest.mark.nightly(
    part="storms", catches="a pause or a cancel that reaches one of two nodes only"
)
def test_a_job_of_two_nodes_is_paused_and_canceled_and_resumes_exactly(machines: Cluster):
    nodes = run_nodes(machines, "a", "b")
    job_id = submit_sft(machines, epochs=40)
    wait_until(lambda: reached(machines, job_id, 2), timeout_s=60)
    assert sorted(machines.client.jobs.get(job_id)["nodes"]) == sorted(nodes)
    there = [node for node in machines.client.nodes.all() if node.name in nodes]
    assert [node.jobs for node in there] == [[job_id], [job_id]]
    machines.client.jobs.pause(job_id)
    wait_until(lambda: machines.events(job_id, "paused"), timeout_s=30)
    machines.client.jobs.unpause(job_id)
    wait_until(lambda: machines.events(job_id, "unpaused"), timeout_s=30)
    machines.client.jobs.cancel(job_id)
    assert machines.wait(job_id, timeout_s=30)["status"] == "stopped"
    wait_until(lambda: not horses_of(nodes, *nodes))
    stopped = machines.events(job_id, "stopped")[-1]["step"]
    assert machines.events(job_id, "checkpoint")[-1]["step"] == stopped
    # The third node starts first: the job could end before it is ready.
    nodes = run_nodes(machines, "a", "b", "c")
    machines.client.jobs.resume(job_id)
    # A stop of any of its nodes lets the job save; the third node takes its place.
    wait_until(lambda: reached(machines, job_id, stopped + 2), timeout_s=60)
    _leader, follower = machines.events(job_id, "started")[-1]["nodes"]
    leaves = nodes[follower]
    leaves.terminate()
    wait_until(lambda: machines.events(job_id, "requeued"), timeout_s=30)
    [requeued] = machines.events(job_id, "requeued")
    assert requeued["reason"] == "the daemon stops"
    assert leaves.wait(timeout=60) == 0
    assert machines.wait(job_id, timeout_s=120)["status"] == "finished"
    assert steps(machines, job_id) == list(range(1, steps(machines, job_id)[-1] + 1))


@pytest.mark.nightly(
    part="networks", catches="a job of three nodes that a drain of their leader changes or ends"
)
def test_three_nodes_train_the_weights_of_one_also_while_their_leader_is_drained(machines: Cluster):
    run_nodes(machines, "a", "b", "c")
    options = {"batch_size": 4, "epochs": 6}
    job_id = submit_sft(machines, nodes=3, **options)
    wait_until(lambda: reached(machines, job_id, 2), timeout_s=60)
    names = machines.events(job_id, "started")[-1]["nodes"]
    assert len(set(names)) == 3
    machines.client.jobs.pause(job_id)  # it must not end before the node has seen the request
    machines.client.nodes.drain(names[0])
    leads = next(name for name in machines.nodes if machines.name_of(name) == names[0])
    wait_until(lambda: (node := machines.seen(leads)) is not None and node.state == "draining")
    machines.client.jobs.unpause(job_id)
    assert machines.wait(job_id)["status"] == "finished", machines.events(job_id, "failed")
    assert len(machines.events(job_id, "started")) == 1
    assert machines.nodes[leads].wait(timeout=60) == 0
    alone = submit_sft(machines, nodes=1, **options)
    assert machines.wait(alone)["status"] == "finished"
    for name, weight in weights(machines, alone).items():
        torch.testing.assert_close(weights(machines, job_id)[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.nightly(
    part="storms", catches="a job of several nodes that continues without one of them"
)
def test_the_death_of_a_part_ends_the_whole_and_it_resumes_exactly(
    machines: Cluster, straight: str
):
    """Of two jobs on four nodes: a horse; then the other node of one and the leader of the other.

    At once, as each such death is seen when a lease ends. The two nodes that are left finish both.
    """
    nodes = run_nodes(machines, "a", "b", "c", "d")
    jobs = [submit_sft(machines) for _ in range(2)]
    for job_id in jobs:
        wait_until(lambda: reached(machines, job_id, 3), timeout_s=60)  # noqa: B023
        machines.client.jobs.pause(job_id)  # it must not end while the other job begins
    (leader, follower), (other_leader, other_follower) = (
        machines.events(job_id, "started")[-1]["nodes"] for job_id in jobs
    )
    machines.client.jobs.unpause(jobs[0])
    [horse] = horses_of(nodes, follower)
    os.kill(horse.pid, signal.SIGKILL)
    wait_until(lambda: len(machines.events(jobs[0], "started")) == 2, timeout_s=60)
    wait_until(lambda: reached(machines, jobs[0], 1), timeout_s=60)
    leader, follower = machines.events(jobs[0], "started")[-1]["nodes"]
    assert {leader, follower, other_leader, other_follower} == set(nodes)
    running = horses_of(nodes, *nodes)
    assert len(running) == 4
    machines.client.jobs.unpause(jobs[1])
    for name in (follower, other_leader):
        kill_tree(nodes[name])
    wait_until(lambda: all(map(gone, running)), timeout_s=40)
    for job_id, executions in zip(jobs, (3, 2), strict=True):
        assert machines.wait(job_id, timeout_s=120)["status"] == "finished"
        assert are_equal(machines, job_id, straight)
        assert steps(machines, job_id) == steps(machines, straight)
        assert len(machines.events(job_id, "started")) == executions
        wait_until(lambda: seats(machines, job_id) == {})  # noqa: B023 - after the end is reported
