"""The commands `nodes`, `drain`, `node` and `gateway`."""

from __future__ import annotations

import os
from typing import Any

import pytest
from breadth import mostly_slow
from desks import Desk

from warmd.configs.queues import TRAIN
from warmd.daemon.queue import keys
from warmd.daemon.queue.nodes import NodeRecord, NodeRegistry
from warmd.daemon.queue.waiting import Offer


@pytest.fixture
def cluster(desk: Desk) -> Desk:
    """A desk with one node."""
    join(desk)
    return desk


def join(desk: Desk, **labels: str) -> None:
    record = NodeRecord(
        machine="gpu7",
        version="1.2.3",
        schema=1,
        labels={"gpu": "h200", "machine": "gpu7", "memory": "64000000000", **labels},
        queues={"train": 2},
        pid=7,
        home="/home",
        state="ready",
        jobs=["grpo-1"],
        jobs_taken=3,
    )
    NodeRegistry(desk.client.connection).beat("gpu7-abcd", record)


def test_nodes_are_listed_for_people_and_for_programs(cluster: Desk):
    (row,) = cluster.warmd("nodes").out.splitlines()[1:]
    shown = row.split()
    assert shown[:5] == ["gpu7-abcd", "ready", "1.2.3", "train=2", "gpu=h200,memory=64GB"]
    assert shown[-1] == "grpo-1"
    (found,) = cluster.rows("nodes")
    assert (found["name"], found["labels"]["gpu"], found["jobs_taken"]) == ("gpu7-abcd", "h200", 3)


def test_drain_marks_a_node_and_refuses_unknown_ones(cluster: Desk):
    assert cluster.warmd("nodes", "--drain", "gpu").out == "draining gpu7-abcd: runs grpo-1\n"
    assert cluster.rows("nodes")[0]["is_draining"]
    assert "ready, to drain" in cluster.warmd("nodes").out
    unknown = cluster.warmd("nodes", "--drain", "gpu8")
    assert unknown.is_refusal(2)
    assert "no node 'gpu8' here: there are gpu7-abcd" in unknown.err


def test_submit_says_when_no_machine_has_the_labels(cluster: Desk):
    fits = cluster.warmd(*cluster.grpo, "--needs", "gpu=h200,memory=64G")
    assert (fits.code, fits.err) == (0, "")
    waits = cluster.warmd(*cluster.grpo, "--needs", "gpu=h200,memory=65G")
    assert waits.code == 0
    assert waits.err.startswith("No machine has memory=65G now: the job waits for one.")
    assert cluster.rows("show", waits.out.strip())[0]["needs"] == {"gpu": "h200", "memory": "65G"}
    wrong = cluster.warmd(*cluster.grpo, "--needs", "gpu")
    assert wrong.is_refusal(2)
    assert len(cluster.rows("queue")) == 2


@pytest.mark.slow
def test_more_processes_than_the_cores_of_the_only_machine_are_refused(desk: Desk):
    join(desk, cores="2")
    refused = desk.warmd(*desk.grpo, "--processes", "3")
    assert refused.is_refusal(2)
    assert "processes: must be at most 2, the cores of this machine, got 3" in refused.err
    sweep = desk.warmd(*desk.grpo, "--sweep", "processes=2,3")
    assert sweep.is_refusal(2)
    assert "the cores of this machine, got 3" in sweep.err
    job_id = desk.submit("--processes", "2")
    desk.client.jobs.cancel(job_id)
    more = desk.warmd("resume", job_id, "--set", "processes=4")
    assert "processes: must be at most 2" in more.err
    join(desk, cores="16")
    assert desk.warmd("resume", job_id, "--set", "processes=4").code == 0
    assert desk.rows("show", job_id)[0]["needs"] == {"cores": "4"}


def test_a_job_of_many_processes_waits_for_a_machine_with_as_many_cores(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
):
    join(desk, cores="2")
    monkeypatch.setenv("WARMD_REDIS_URL", desk.server.url)
    fits = desk.warmd(*desk.grpo, "--processes", "2")
    assert (fits.code, fits.err) == (0, "")
    waits = desk.warmd(*desk.grpo, "--processes", "3")
    assert waits.code == 0
    assert waits.err.startswith("No machine has cores=3 now: the job waits for one.")
    connection = desk.client.connection
    for set_aside in (False, True):
        popped: Any = connection.lmove("rq:queue:train", keys.taken("w"), "LEFT", "RIGHT")
        needs = desk.client.store.needs_of_popped(popped)
        offer = Offer({"schema": "9", "cores": "2"}, os.path.isdir, lambda needs: False)
        assert bool(offer.unmet(needs)) is set_aside
        if set_aside:
            assert desk.client.store.set_aside(popped, TRAIN, "w", needs)
    assert "cores=3" in desk.warmd("queue").out


@pytest.mark.parametrize("command", mostly_slow(["node", "gateway"], but=["node"]))
def test_a_node_without_a_shared_redis_is_refused(desk: Desk, command: str, monkeypatch):
    monkeypatch.delenv("WARMD_REDIS_URL", raising=False)
    done = desk.warmd(command)
    assert done.is_refusal(2)
    assert "redis_url: must be given: --redis URL" in done.err


@pytest.mark.parametrize(
    ("options", "field"),
    [
        pytest.param(("--queues", "gpu"), "queues", marks=pytest.mark.slow),
        (("--labels", "gpu"), "labels"),
        pytest.param(("--idle-exit", "soon"), "idle_exit", marks=pytest.mark.slow),
        pytest.param(("--max-jobs", "0"), "max_jobs", marks=pytest.mark.slow),
        pytest.param(("--redis", "http://x"), "redis_url", marks=pytest.mark.slow),
    ],
)
def test_wrong_options_of_a_node_are_refused(desk: Desk, options, field):
    done = desk.warmd("node", "--redis", "redis://127.0.0.1:1", *options)
    assert done.is_refusal(2)
    assert f"Error: {field}: must be " in done.err
