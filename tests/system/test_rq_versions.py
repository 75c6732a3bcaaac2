"""Several versions of RQ on one Redis: on two nodes at once, and one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from clusters import Cluster, cluster, kill_tree
from rq_versions import IS_3, other_rq, run_python
from waiting import wait_until

pytestmark = pytest.mark.nightly(
    part="homes", catches="a job that one version of RQ writes and another cannot read or loses"
)

INFO = "from rq.cli import main; main()"  # `rq` of another version


LONG: dict[str, Any] = {"epochs": 12, "reward": ["behaviours:slow_at_gate"]}


@pytest.fixture
def machines(tiny_model: Path) -> Iterator[Cluster]:
    with cluster(tiny_model) as made:
        (made.folder / "gate").touch()
        yield made


def leftovers(machines: Cluster) -> list[bytes]:
    """RQ's keys of executions, none of which may stay when no job runs."""
    found: Any = machines.client.connection
    patterns = ("rq:wip:*", "rq:execution*", "rq:worker:*:executions", "rq:ready:*")
    return [key for pattern in patterns for key in found.keys(pattern)]


def test_nodes_with_two_versions_of_rq_share_one_redis(machines: Cluster):
    machines.node("first", "--labels", "rq=own")
    machines.node("second", "--labels", "rq=other", source=other_rq())
    machines.wait_ready("first", "second")
    own = machines.submit(needs={"rq": "own"})
    other = machines.submit(needs={"rq": "other"}, after=own)
    last = machines.submit(needs={"rq": "own"}, after=other)
    jobs = [machines.wait(job_id) for job_id in (own, other, last)]
    assert [(job["status"], job["execution"]) for job in jobs] == [("finished", 1)] * 3
    assert leftovers(machines) == []


@pytest.mark.parametrize("dies", ["own", "other"])
def test_a_job_of_a_killed_node_continues_with_the_other_version(machines: Cluster, dies: str):
    sources = {"own": None, "other": other_rq()}
    survives = "other" if dies == "own" else "own"
    machines.node(dies, source=sources[dies])
    machines.wait_ready(dies)
    job_id = machines.submit(**LONG)
    waiting = machines.submit(after=job_id)
    wait_until(lambda: len(machines.events(job_id, "checkpoint")) > 1)
    kill_tree(machines.nodes[dies])
    machines.node(survives, source=sources[survives])
    job = machines.wait(job_id, timeout_s=120)
    assert (job["status"], job["execution"]) == ("finished", 2)
    assert machines.wait(waiting)["status"] == "finished"
    wait_until(lambda: leftovers(machines) == [])


def test_a_redis_is_continued_by_another_version_and_back(machines: Cluster):
    client = machines.client
    machines.node("node")
    machines.wait_ready("node")
    done, failed = machines.submit(), machines.submit(reward=["behaviours:raises"])
    (machines.folder / "broken").touch()
    assert machines.wait(done)["status"] == "finished"
    assert machines.wait(failed)["status"] == "failed"
    running = machines.submit(**LONG)
    deferred, queued, paused = machines.submit(after=running), machines.submit(), machines.submit()
    client.jobs.pause(paused)
    for source in (other_rq(), None):
        before = machines.wait(running, "started")["execution"]
        saved = len(machines.events(running, "checkpoint"))
        wait_until(lambda: len(machines.events(running, "checkpoint")) > saved)  # noqa: B023
        kill_tree(machines.nodes["node"])
        statuses = {job["id"]: job["status"] for job in client.jobs.all()}
        assert statuses[deferred] == "deferred"
        machines.node("node", source=source)
        wait_until(lambda: client.jobs.get(running)["execution"] > before, timeout_s=120)  # noqa: B023
    client.jobs.cancel(running)
    assert machines.wait(running)["status"] in ("stopped", "finished")
    assert machines.wait(queued)["status"] == "finished"
    client.jobs.unpause(paused)
    assert machines.wait(paused)["status"] == "finished"
    (machines.folder / "broken").unlink()
    client.jobs.resume(failed)
    assert machines.wait(failed)["status"] == "finished"
    client.jobs.cancel(deferred)
    for job_id in (done, failed, running, deferred):
        client.jobs.remove(job_id)
    left: Any = client.connection.keys("rq:results:*")
    assert len(left) == 2  # of the jobs that were not removed
    wait_until(lambda: leftovers(machines) == [])


def test_rq_info_of_either_version_shows_the_jobs_of_the_other(machines: Cluster):
    machines.node("node", source=other_rq())
    machines.wait_ready("node")
    job_id = machines.submit(**LONG)
    machines.wait(job_id, "started")
    for source in (Path("/nonexistent"), other_rq()):
        info = partial(run_python, INFO, "info", "--url", machines.url, source=source)
        wait_until(lambda: "busy train" in info())  # noqa: B023
        assert "train        | 0, 1 executing, 0 finished, 0 failed" in info()
    machines.client.jobs.cancel(job_id)


@pytest.mark.skipif(not IS_3, reason="RQ 2 has no RQ_KEY_PREFIX")
def test_a_node_with_another_prefix_of_keys_is_refused_in_one_line(machines: Cluster):
    machines.node("first")
    machines.wait_ready("first")
    machines.settings = {"RQ_KEY_PREFIX": "team:a"}
    second = machines.node("second")
    assert second.wait(120) == 2
    last = machines.log("second").strip().splitlines()[-1]
    assert "RQ_KEY_PREFIX: must be rq, the prefix of the jobs in this Redis, got team:a" in last
    assert "Traceback" not in machines.log("second")


@pytest.mark.skipif(not IS_3, reason="RQ 2 has no RQ_KEY_PREFIX")
def test_a_node_with_rq_2_is_refused_where_keys_have_another_prefix(machines: Cluster):
    machines.settings = {"RQ_KEY_PREFIX": "{team}"}
    machines.node("first")
    machines.wait_ready("first")
    second = machines.node("second", source=other_rq())
    assert second.wait(120) == 2
    last = machines.log("second").strip().splitlines()[-1]
    assert "RQ_KEY_PREFIX: must be {team}" in last
    assert "install RQ 3, as 2.11.0 has no such setting" in last
