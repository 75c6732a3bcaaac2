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
from waiting import wait_until

from warmd.daemon.queue.lease import LEASE_S
from warmd.jobs import spec_class

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

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
def network(shared: Machines) -> Iterator[Machines]:
    yield shared
    for name in EVERYWHERE:
        shared.cable(name, "up")
        if shared.has_ended(name):
            shared.boot(name, **SETTINGS)
    shared.wait_ready(*EVERYWHERE)


def machine_of(network: Machines, job_id: str) -> str:
    """The machine whose worker runs a job."""
    worker = network.client.job(job_id)["worker"]
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


def begin(network: Machines, **options: Any) -> tuple[str, str]:
    """Submit a long job; return it and its machine once it has a checkpoint."""
    # However fast the processor is, the job has still to run when the machine has given it up.
    job_id = network.submit(**{"epochs": 6, "reward": ["behaviours:slow"], **options})
    wait_until(lambda: network.events(job_id, "checkpoint"), timeout_s=120)
    return job_id, machine_of(network, job_id)


def test_times_use_the_clock_of_redis_whatever_the_clocks_of_the_machines(network: Machines):
    begun = time.time()
    code, job_id = network.run(
        "third", "submit", "infer", "1 and 2", "--model", "tiny", "--in", "2s"
    )
    assert code == 0, job_id
    jobs = [job_id.strip()]
    for number in range(9):  # so that each machine has some
        values = {"prompt": f"{number} and 2", "model": "tiny", "max_tokens": 4}
        jobs.append(network.client.submit(spec_class("infer").parse(values)))
    for one in jobs:
        job = network.wait(one)
        assert job["status"] == "finished", job["error"]
        for moment in ("created_at", "enqueued_at", "started_at", "ended_at"):
            assert begun - 1 < job[moment] < time.time() + 1, moment
        (started,) = network.events(one, "started")
        assert started["queued_s"] < time.time() - begun
        for event in network.events(one, "finished"):
            assert begun - 1 < event["time"] < time.time() + 1
    assert network.client.job(jobs[0])["started_at"] >= begun + 2
    # The leader keeps answers for five minutes after their end, also those of the third machine.
    time.sleep(6)
    assert len(network.client.jobs(limit=None)) == len(jobs)


def test_an_eta_does_not_depend_on_the_clock_of_the_machine(network: Machines):
    jobs = [network.submit(epochs=3) for _ in EVERYWHERE]
    seen: dict[str, float] = {}

    def all_seen() -> bool:
        for job_id in jobs:
            job = network.client.job(job_id)
            if job["eta_s"] is not None and job["step"] < job["steps_total"] - 2:
                seen[job_id] = job["eta_s"]
        return len(seen) == len(jobs)

    wait_until(all_seen, timeout_s=120)
    assert all(0 < eta_s < 300 for eta_s in seen.values()), seen
    assert all(network.wait(job_id)["status"] == "finished" for job_id in jobs)


def test_a_machine_that_is_cut_off_ends_its_job_before_another_takes_it(network: Machines):
    job_id, name = begin(network)
    (horse,) = horses(network, name, job_id)
    network.cable(name, "cut")
    cut_at = time.monotonic()
    wait_until(lambda: gone(horse), timeout_s=LEASE_S)
    ended_at = time.monotonic()
    wait_until(lambda: network.client.job(job_id)["execution"] == 2, timeout_s=60)
    taken_at = time.monotonic()
    # Its last renewal may have been a seventh of the lease before the cut.
    assert LEASE_S * (2 / 3 - 1 / 7) - 1 < ended_at - cut_at < LEASE_S < taken_at - cut_at + 3
    assert ended_at < taken_at
    assert machine_of(network, job_id) != name
    network.cable(name, "up")
    job = network.wait(job_id, timeout_s=120)
    assert (job["status"], job["execution"]) == ("finished", 2)
    assert is_exact(network, job_id)
    network.wait_ready(name)
    assert "could not renew its lease" in network.log(name)


def test_cuts_that_are_shorter_than_the_lease_end_no_job(network: Machines):
    jobs = [network.submit(epochs=6) for _ in EVERYWHERE]
    wait_until(lambda: all(network.events(one, "step") for one in jobs), timeout_s=120)
    for name, state in zip(EVERYWHERE, ("cut", "deaf", "reset"), strict=True):
        network.cable(name, state)
    time.sleep(LEASE_S / 3)
    for name in EVERYWHERE:
        network.cable(name, "up")
    for job_id in jobs:
        job = network.wait(job_id, timeout_s=120)
        assert (job["status"], job["execution"]) == ("finished", 1)
        assert is_exact(network, job_id)


def test_a_job_of_two_machines_ends_as_a_whole_when_one_is_cut_off(network: Machines):
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
    wait_until(lambda: network.client.job(job_id)["execution"] == 2, timeout_s=90)
    assert all(map(gone, parts))
    network.cable(machines_of[1], "up")
    job = network.wait(job_id, timeout_s=120)
    assert (job["status"], job["execution"]) == ("finished", 2)
    assert is_exact(network, job_id)
    lost = f"node {started['nodes'][1]} was lost"
    assert [event["reason"] for event in network.events(job_id, "requeued")] == [lost]


def test_slow_networks_cost_time_and_no_executions(network: Machines):
    for name in EVERYWHERE:
        network.cable(name, "up", delay_s=0.1, jitter_s=0.025)  # on each way
    jobs = [network.submit() for _ in range(6)]
    for job_id in jobs:
        job = network.wait(job_id, timeout_s=180)
        assert (job["status"], job["execution"]) == ("finished", 1)
        assert is_exact(network, job_id)
    assert {node.state for node in network.client.nodes()} == {"ready"}


def test_redis_that_restarts_while_a_machine_is_cut_off_loses_nothing(network: Machines):
    job_id, name = begin(network)
    others = [network.submit() for _ in range(3)]
    network.cable(name, "cut")
    network.kill_redis()
    network.start_redis()
    for one in (job_id, *others):
        job = network.wait(one, timeout_s=180)
        assert job["status"] == "finished", job["error"]
        assert is_exact(network, one)
    assert network.client.job(job_id)["execution"] == 2


def test_jobs_that_end_while_their_machines_are_cut_off_end_once(network: Machines):
    jobs = [network.submit(epochs=4) for _ in EVERYWHERE]
    wait_until(lambda: all(network.events(one, "step") for one in jobs), timeout_s=120)
    states = dict(zip(jobs, ("cut", "deaf", "reset"), strict=True))
    machine = {job_id: machine_of(network, job_id) for job_id in jobs}
    total = network.client.job(jobs[0])["steps_total"]
    left = set(jobs)

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


def test_commands_answer_in_a_line_while_redis_hangs(network: Machines):
    network.cable("second", "cut")
    for command in (("nodes",), ("jobs",), ("drain", network.name_of("second"))):
        begun = time.monotonic()
        code, output = network.run("second", *command)
        assert code == 3, output
        assert re.fullmatch(rf"(Error: )?(no )?Redis at redis://\S*{HUB}\S* .*\n", output), output
        assert time.monotonic() - begun < 12  # five seconds, and a start on a busy machine


def test_a_drained_machine_that_is_cut_off_leaves_when_the_network_is_back(network: Machines):
    job_id, name = begin(network)
    network.cable(name, "cut")
    network.client.drain(network.name_of(name))
    job = network.wait(job_id, timeout_s=120)
    assert (job["status"], job["execution"]) == ("finished", 2)
    assert not network.has_ended(name)  # it cannot know
    network.cable(name, "up")
    assert network.wait_off(name, timeout_s=60) == 0
    assert network.seen(name) is None
