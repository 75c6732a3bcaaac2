"""The cost of a read depends on its result: ended and waiting jobs do not slow it down."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from desks import Desk
from ended_jobs import FEW, WORKER, end, reads, wait

from warmd.configs.queues import QUEUES
from warmd.daemon.lifecycle import index as indexing
from warmd.daemon.queue import job_index, keys, listing
from warmd.daemon.runs.rundir import RunDir

MANY = 120
SETTLED_S = 1.1  # for so long after a submission every read indexes the run directories


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    """A home with ended jobs, one that runs and two that wait."""
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        desk = Desk(Path(folder))
        desk.submit()
        desk.begin()
        desk.submit()
        desk.submit("--in", "1h")
        yield desk
        desk.close()


def cost(desk: Desk, read: Callable[[], object]) -> tuple[int, int]:
    """The commands that Redis runs for a read, and the bytes that it sends."""
    read()  # measured once

    def totals() -> tuple[int, int]:
        info: Any = desk.client.connection.info("stats")
        return info["total_commands_processed"], info["total_net_output_bytes"]

    def spent() -> tuple[int, int]:
        before = totals()
        read()
        after = totals()
        return after[0] - before[0], after[1] - before[1]

    return spent()


def costs(desk: Desk) -> dict[str, tuple[int, int]]:
    time.sleep(SETTLED_S)
    return {name: cost(desk, read) for name, read in reads(desk).items()}


@pytest.mark.slow
def test_reading_jobs_does_not_slow_down_with_many_ended_jobs(desk: Desk):
    end(desk.client, FEW), end(desk.client, FEW, "grpo")
    few = costs(desk)
    end(desk.client, MANY), end(desk.client, MANY, "grpo")
    many = costs(desk)
    for name, (commands, num_bytes) in few.items():
        assert many[name][0] <= commands + 3, name
        assert many[name][1] <= num_bytes * 1.2 + 200, name


@pytest.mark.slow
def test_reading_jobs_does_not_slow_down_with_many_waiting_jobs(desk: Desk):
    few = costs(desk)
    waiting = wait(desk.client, MANY)
    many = costs(desk)
    for job_id in waiting:
        desk.client.jobs.cancel(job_id)
    # `queue` lists them; /metrics reads up to a thousand to find the oldest; of the ids of those
    # that wait, the ones from the command line are found.
    assert many.pop("queue") > few["queue"]
    assert many.pop("/metrics") > few["/metrics"]
    assert many["the only job that runs"][0] <= few["the only job that runs"][0]
    del many["the only job that runs"]
    for name, (commands, num_bytes) in many.items():
        assert commands <= few[name][0] + 3, name
        assert num_bytes <= few[name][1] * 1.2 + 200, name


def index(desk: Desk) -> dict[str, Any]:
    connection = desk.client.connection
    zsets = [*map(keys.jobs, QUEUES), keys.FROM_CLI, keys.ANSWERS]
    zsets += [keys.of_kind(kind) for kind in ("grpo", "infer")]
    found: dict[str, Any] = {key: connection.zrange(key, 0, -1, withscores=True) for key in zsets}
    sets = {keys.stopped(queue) for queue in QUEUES}
    return found | {key: connection.smembers(key) for key in sets}


@pytest.mark.slow
def test_the_job_index_of_an_earlier_versions_home_is_built_from_its_jobs(desk: Desk):
    end(desk.client, 2)
    desk.warmd("cancel", desk.submit())
    desk.begin().stop()
    desk.submit()  # for the tests after this one
    before = index(desk)
    assert all(before[key] for key in before if key != keys.stopped("infer"))
    for key in (*before, keys.INDEXED):
        desk.client.connection.delete(key)
    indexing.ensure(desk.client.connection, desk.home.runs)
    after = index(desk)
    assert after == before
    indexing.build(desk.client.connection, desk.home.runs)  # as every daemon does when it starts
    assert index(desk) == after


def test_counts_distinguish_stopped_from_failed_jobs_also_after_a_resume(desk: Desk):
    def counts() -> tuple[int, int]:
        found = listing.counts(desk.client.connection, "train")
        return found["failed"], found["stopped"]

    failed, stopped = counts()
    run = desk.begin()
    run.stop()
    assert counts() == (failed, stopped + 1)
    desk.client.jobs.resume(run.id, front=True)
    assert counts() == (failed, stopped)
    desk.begin().fail("no reason")
    assert counts() == (failed + 1, stopped)
    desk.client.jobs.remove(run.id)
    assert counts() == (failed, stopped)
    assert run.id not in job_index.newest(desk.client.connection, QUEUES, None)


def test_a_job_requeued_by_rqs_tools_is_not_counted_as_ended(desk: Desk):
    (job_id,) = end(desk.client, 1)
    connection = desk.client.connection
    job = desk.client.store.fetch(job_id)
    assert job is not None
    connection.zrem("rq:finished:infer", job_id)
    desk.client.store.queue("infer").enqueue_job(job)
    popped: Any = connection.lmove("rq:queue:infer", keys.taken(WORKER), "LEFT", "RIGHT")
    begun = desk.client.store.begin(popped, "infer", WORKER)
    assert begun is not None
    assert connection.zscore(keys.ANSWERS, job_id) is None
    desk.client.store.finish(begun[0], begun[1].claim)
    assert connection.zscore(keys.ANSWERS, job_id) is not None


@pytest.mark.slow
def test_the_latest_job_is_never_an_answer(desk: Desk):
    latest = desk.submit()
    end(desk.client, 30)
    assert desk.client.find(None) == latest
    assert [job["id"] for job in desk.rows("show")] == [latest]
    assert desk.warmd("logs", "-").err.count(latest) == 1  # no log yet, of that job
    desk.client.jobs.cancel(latest)


def test_the_origin_of_a_job_is_read_from_earlier_versions_too(desk: Desk, tmp_path: Path):
    spec = {"spec": {"model": "tiny"}}
    typed = RunDir.create(tmp_path, "infer", {**spec, "python_path": ["/somewhere"]})
    requested = RunDir.create(tmp_path, "infer", {**spec, "python_path": []})
    assert (typed.origin(), requested.origin()) == ("cli", "http")
