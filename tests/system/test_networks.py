"""Machines with networks that break and clocks that disagree: nothing is lost or done twice."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from cables import HUB
from daemons import gone
from machines import Machines, check_tools, machines
from waiting import holds_for, wait_until

from warmd.daemon.lifecycle.view import JobFilter
from warmd.daemon.queue.keys import LEASE_S
from warmd.daemon.queue.workers import RENEWALS
from warmd.jobs import spec_class
from warmd.jobs.training.gloo_group import UNREACHABLE_S

pytestmark = [
    pytest.mark.nightly(
        part="networks", catches="a job lost, repeated or timed wrongly by one fault of a link"
    ),
    pytest.mark.timeout(400),
]

EVERYWHERE = ("first", "second", "third")
SETTINGS = {"keep_answers": "5m", "gang_address": "auto"}


@pytest.fixture(scope="module")
def shared(tiny_model: Path) -> Iterator[Machines]:
    """Three machines whose nodes run, for all tests that leave them so."""
    check_tools()
    with machines(tiny_model) as made:
        for name in EVERYWHERE:
            made.boot(name, **SETTINGS)
        made.wait_ready(*EVERYWHERE, timeout_s=240)  # they share the processor with each other
        yield made


@pytest.fixture
def network(shared: Machines) -> Machines:
    gate(shared).unlink(missing_ok=True)
    for name in EVERYWHERE:
        shared.cable(name, "up")
        if shared.has_ended(name):
            shared.boot(name, **SETTINGS)
    shared.wait_ready(*EVERYWHERE)
    return shared


def machine_of(network: Machines, job_id: str) -> str:
    """The machine whose worker runs a job."""
    worker = network.client.jobs.get(job_id)["worker"]
    (name,) = [name for name in EVERYWHERE if worker.split(":")[1] in network.name_of(name)]
    return name


def horses(network: Machines, name: str, job_id: str) -> list[psutil.Process]:
    """The processes of a machine that write the log of a job."""
    log = str(network.runs / job_id / "log.txt")
    found = []
    for process in network.processes(name):
        paths = {str(path) for path in _open_files(process.pid)}
        if log in paths:
            found.append(process)
    return found


def _open_files(pid: int) -> Iterator[Path]:
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            yield link.readlink()
    except OSError:  # it has just ended
        return


def is_exact(network: Machines, job_id: str) -> bool:
    """Whether the job has reported each of its steps once."""
    steps = [event["step"] for event in network.events(job_id, "step")]
    return bool(steps) and steps == list(range(1, len(steps) + 1))


def gate(network: Machines) -> Path:
    """While this file exists, the jobs of `submit_long` take long."""
    return network.folder / "gate"


def submit_long(network: Machines, **options: Any) -> str:
    """Submit a job that takes long until the gate is removed, however fast the processor is."""
    gate(network).touch()
    return network.submit(**{"epochs": 8, "reward": ["behaviours:slow_at_gate"], **options})


def begin(network: Machines, **options: Any) -> tuple[str, str]:
    """Submit such a job; return it and its machine once it has a checkpoint."""
    job_id = submit_long(network, **options)
    wait_until(lambda: network.events(job_id, "checkpoint"), timeout_s=120)
    return job_id, machine_of(network, job_id)


def lose_redis(network: Machines) -> None:
    network.kill_redis()
    network.start_redis()


def test_times_use_the_clock_of_redis_whatever_the_clocks_of_the_machines(network: Machines):
    begun = time.time()
    code, job_id = network.run(
        "third", "submit", "infer", "1 and 2", "--model", "tiny", "--in", "2s"
    )
    assert code == 0, job_id
    jobs = [job_id.strip()]
    for number in range(9):  # so that each machine has some
        values = {"prompt": f"{number} and 2", "model": "tiny", "max_tokens": 4}
        jobs.append(network.client.jobs.submit(spec_class("infer").parse(values)))
    for one in jobs:
        job = network.wait(one)
        assert job["status"] == "finished", job["error"]
        for moment in ("created_at", "enqueued_at", "started_at", "ended_at"):
            assert begun - 1 < job[moment] < time.time() + 1, moment
        (started,) = network.events(one, "started")
        assert started["queued_s"] < time.time() - begun
        for event in network.events(one, "finished"):
            assert begun - 1 < event["time"] < time.time() + 1
    assert network.client.jobs.get(jobs[0])["started_at"] >= begun + 2
    # The leader keeps answers for five minutes after their end, also those of the third machine.
    holds_for(6, lambda: len(network.client.jobs.all(JobFilter(limit=None))) == len(jobs))


def test_an_eta_does_not_depend_on_the_clock_of_the_machine(network: Machines):
    jobs = [network.submit(epochs=3) for _ in EVERYWHERE]
    seen: dict[str, float] = {}

    def all_seen() -> bool:
        for job_id in jobs:
            job = network.client.jobs.get(job_id)
            if job["eta_s"] is not None and job["step"] < job["steps_total"] - 2:
                seen[job_id] = job["eta_s"]
        return len(seen) == len(jobs)

    wait_until(all_seen, timeout_s=120)
    assert all(0 < eta_s < 300 for eta_s in seen.values()), seen
    assert all(network.wait(job_id)["status"] == "finished" for job_id in jobs)


def test_cuts_that_are_shorter_than_the_lease_end_no_job(network: Machines):
    jobs = [submit_long(network) for _ in EVERYWHERE]
    wait_until(lambda: all(network.events(one, "step") for one in jobs), timeout_s=120)
    for name, state in zip(EVERYWHERE, ("cut", "deaf", "reset"), strict=True):
        network.cable(name, state)
    time.sleep(LEASE_S / 3)
    for name in EVERYWHERE:
        network.cable(name, "up")
    gate(network).unlink()
    for job_id in jobs:
        job = network.wait(job_id, timeout_s=120)
        assert (job["status"], job["execution"]) == ("finished", 1)
        assert is_exact(network, job_id)


def test_a_job_of_two_machines_ends_as_a_whole_when_one_is_cut_off(network: Machines):
    """Meanwhile commands on that machine answer in a line, although Redis hangs."""
    job_id, name = begin(network, nodes=2)
    (started,) = network.events(job_id, "started")
    machines_of = [m for node in started["nodes"] for m in EVERYWHERE if network.name_of(m) == node]
    assert machines_of[0] == name
    network.cable(machines_of[1], "cut")
    time.sleep(LEASE_S / 3)
    network.cable(machines_of[1], "up")  # a cut that is shorter than the lease ends no job
    steps = len(network.events(job_id, "step"))
    wait_until(lambda: len(network.events(job_id, "step")) > steps, timeout_s=60)
    parts = [horse for machine in machines_of for horse in horses(network, machine, job_id)]
    assert len(parts) == 2
    network.cable(machines_of[1], "cut")
    commands_answer_in_a_line(network, machines_of[1])
    wait_until(lambda: network.client.jobs.get(job_id)["execution"] == 2, timeout_s=90)
    assert all(map(gone, parts))
    gate(network).unlink()
    network.cable(machines_of[1], "up")
    job = network.wait(job_id, timeout_s=120)
    assert (job["status"], job["execution"]) == ("finished", 2)
    assert is_exact(network, job_id)
    lost = f"node {started['nodes'][1]} was lost"
    assert [event["reason"] for event in network.events(job_id, "requeued")] == [lost]


def test_a_job_of_two_machines_that_lose_only_each_other_ends_as_a_whole(network: Machines):
    job_id, name = begin(network, nodes=2)
    parts = [part for machine in EVERYWHERE for part in horses(network, machine, job_id)]
    assert len(parts) == 2
    network.cable(name, "apart")  # both still reach Redis
    wait_until(lambda: all(map(gone, parts)), timeout_s=UNREACHABLE_S + 5)
    gate(network).unlink()
    network.cable(name, "up")
    job = network.wait(job_id, timeout_s=60)
    assert (job["status"], job["execution"]) == ("finished", 2)
    assert is_exact(network, job_id)
    (requeued,) = network.events(job_id, "requeued")
    assert "another node could not be reached" in requeued["reason"]


def commands_answer_in_a_line(network: Machines, name: str) -> None:
    for command in (("nodes",), ("jobs",), ("nodes", "--drain", network.name_of("second"))):
        begun = time.monotonic()
        code, output = network.run(name, *command)
        assert code == 3, output
        assert re.fullmatch(rf"(Error: )?(no )?Redis at redis://\S*{HUB}\S* .*\n", output), output
        assert time.monotonic() - begun < 12  # five seconds, and a start on a busy machine


def test_slow_networks_cost_time_and_no_executions(network: Machines):
    for name in EVERYWHERE:
        network.cable(name, "up", delay_s=0.1, jitter_s=0.025)  # on each way
    jobs = [network.submit() for _ in range(6)]
    for job_id in jobs:
        job = network.wait(job_id, timeout_s=180)
        assert (job["status"], job["execution"]) == ("finished", 1)
        assert is_exact(network, job_id)
    assert {node.state for node in network.client.nodes.all()} == {"ready"}


def test_jobs_that_end_while_their_machines_are_cut_off_end_once(network: Machines):
    jobs = [submit_long(network, epochs=4) for _ in EVERYWHERE]
    wait_until(lambda: all(network.events(one, "step") for one in jobs), timeout_s=120)
    states = dict(zip(jobs, ("cut", "deaf", "reset"), strict=True))
    machine = {job_id: machine_of(network, job_id) for job_id in jobs}
    total = network.client.jobs.get(jobs[0])["steps_total"]
    left = set(jobs)
    gate(network).unlink()

    def cut_before_its_end() -> bool:
        for job_id in list(left):
            if len(network.events(job_id, "step")) >= total - 1:
                network.cable(machine[job_id], states[job_id])
                left.remove(job_id)
        return not left

    wait_until(cut_before_its_end, timeout_s=120)
    # On a busy machine, one may be ended by its own node before: then it finishes elsewhere.
    ends = ("finished", "requeued")
    wait_until(lambda: all(any(network.events(one, e) for e in ends) for one in jobs), timeout_s=60)
    paths = [network.runs / one / "result.json" for one in jobs]
    results = {path: path.read_bytes() for path in paths if path.exists()}
    for name in EVERYWHERE:
        network.cable(name, "up")
    for job_id in jobs:
        job = network.wait(job_id, timeout_s=60)
        assert job["status"] == "finished", job["error"]
        assert len(network.events(job_id, "finished")) == 1
        assert is_exact(network, job_id)
    assert results == {path: path.read_bytes() for path in results}


def test_machines_that_are_cut_off_end_their_jobs_before_another_takes_them(network: Machines):
    """Two at once, as each cut costs a lease. Meanwhile Redis restarts, and one is drained.

    Nothing is lost by that. When the network is back, the drained machine leaves.
    """
    begun = [begin(network), begin(network)]
    (job_id, name), (other_id, drained) = begun
    (horse,), (other_horse,) = (horses(network, machine, one) for one, machine in begun)
    waiting = [network.submit() for _ in range(3)]
    for machine in (name, drained):
        network.cable(machine, "cut")
    cut_at = time.monotonic()
    lose_redis(network)
    network.client.nodes.drain(network.name_of(drained))
    wait_until(lambda: gone(horse), timeout_s=LEASE_S)
    ended_at = time.monotonic()
    wait_until(lambda: gone(other_horse), timeout_s=LEASE_S - (ended_at - cut_at))
    jobs = (job_id, other_id)

    def taken() -> str | None:  # the third machine takes one of them, and the other one later
        return next((one for one in jobs if network.client.jobs.get(one)["execution"] == 2), None)

    assert machine_of(network, wait_until(taken, timeout_s=60)) not in (name, drained)
    taken_at = time.monotonic()
    # Its last renewal may have been some time before the cut.
    assert (
        LEASE_S * (2 / 3 - 1 / RENEWALS) - 1 < ended_at - cut_at < LEASE_S < taken_at - cut_at + 3
    )
    assert ended_at < taken_at
    gate(network).unlink()
    for one in (*jobs, *waiting):
        job = network.wait(one, timeout_s=120)
        assert (job["status"], job["execution"]) == ("finished", 2 if one in jobs else 1)
        assert is_exact(network, one)
    assert not network.has_ended(drained)  # it cannot know
    for machine in (name, drained):
        network.cable(machine, "up")
    assert network.wait_off(drained, timeout_s=60) == 0
    assert network.seen(drained) is None
    network.wait_ready(name)
    assert "could not renew its lease" in network.log(name)
