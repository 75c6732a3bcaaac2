"""Prometheus' metrics of jobs, trainings, processes and the machine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from desks import Desk, Run
from prometheus_client.parser import text_string_to_metric_families as parse

from warmd.configs.queues import TRAIN
from warmd.daemon.gateway.core.metrics import Metrics
from warmd.daemon.queue import keys, totals
from warmd.daemon.queue.nodes import NodeRegistry
from warmd.daemon.queue.workers import WorkerRegistry


@pytest.fixture
def desk() -> Iterator[Desk]:
    with tempfile.TemporaryDirectory(prefix="warmd-") as folder:
        made = Desk(Path(folder))
        yield made
        made.close()


def scrape(desk: Desk) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """The value of every sample, by its name and labels."""
    text = Metrics(desk.client).text().decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in parse(text)
        for sample in family.samples
    }


def value(desk: Desk, name: str, **labels: str) -> float | None:
    return scrape(desk).get((name, frozenset(labels.items())))


def begun_ago(desk: Desk, run: Run, seconds: float) -> None:
    """Let a job have begun earlier, as if a clock had run on."""
    now = desk.client.store.clock()
    desk.client.connection.hset(run.job.key, keys.FIELD_BEGUN, f"{now - seconds}")


def test_durations_of_ended_jobs_are_in_buckets_by_kind_and_status(desk: Desk):
    for seconds, end in ((2, Run.stop), (200, Run.stop), (10_000_000, Run.stop)):
        desk.submit()
        run = desk.begin()
        begun_ago(desk, run, seconds)
        end(run)
    desk.submit()
    desk.begin().fail("no reason")
    desk.submit()
    desk.begin().finish({})
    found = scrape(desk)

    def bucket(status: str, bound: str) -> float:
        labels = {"kind": "grpo", "status": status, "le": bound}
        return found["warmd_job_duration_seconds_bucket", frozenset(labels.items())]

    stopped = [bucket("stopped", bound) for bound in ("1.0", "5.0", "60.0", "300.0", "+Inf")]
    assert stopped == [0, 1, 1, 2, 3]
    assert bucket("failed", "+Inf") == bucket("finished", "+Inf") == 1
    labels = frozenset({"kind": "grpo", "status": "stopped"}.items())
    assert found["warmd_job_duration_seconds_count", labels] == 3
    assert found["warmd_job_duration_seconds_sum", labels] == pytest.approx(10_000_202, abs=5)


@pytest.mark.slow
def test_the_duration_of_an_interrupted_job_includes_its_earlier_executions(desk: Desk):
    desk.submit()
    run = desk.begin()
    begun_ago(desk, run, 1000)
    run.store.requeue(run.job, run.execution, reason="horse_died")
    desk.begin().finish({})
    labels = {"kind": "grpo", "status": "finished"}
    took = value(desk, "warmd_job_duration_seconds_sum", **labels)
    assert took == pytest.approx(1000, abs=5)
    # A finished job that is run again, as its result is gone, counts anew.
    (run.rundir.path / "result.json").unlink()
    desk.client.jobs.resume(run.id, front=True)
    desk.begin().finish({})
    assert value(desk, "warmd_job_duration_seconds_count", **labels) == 2
    assert value(desk, "warmd_job_duration_seconds_sum", **labels) == pytest.approx(took, abs=5)


@pytest.mark.slow
def test_a_job_that_an_earlier_version_began_is_not_counted(desk: Desk):
    desk.submit()
    run = desk.begin()
    desk.client.connection.hdel(run.job.key, keys.FIELD_BEGUN)
    run.finish({})
    assert desk.client.jobs.get(run.id)["status"] == "finished"
    assert totals.read(desk.client.connection).durations == {}


@pytest.mark.slow
def test_requeued_jobs_are_counted_by_the_reason(desk: Desk):
    desk.submit()
    run = desk.begin()
    run.store.requeue(run.job, run.execution, reason="horse_died")
    desk.begin()
    registry = WorkerRegistry(desk.client.store)
    assert registry.reclaim("w", TRAIN) == [run.id]
    run = desk.begin()
    run.store.requeue(run.job, run.execution)
    counts = {
        reason: value(desk, "warmd_job_requeues_total", kind="grpo", reason=reason)
        for reason in totals.REASONS
    }
    assert counts == {
        "requested": 1,
        "horse_died": 1,
        "worker_died": 1,
        "failed": 0,
        "model_missing": 0,
    }


@pytest.mark.slow
def test_failed_saves_are_counted_once_also_when_redis_was_away(desk: Desk):
    def saves() -> float | None:
        return value(desk, "warmd_job_alerts_total", kind="grpo", type="save_failed")

    desk.submit()
    run = desk.begin()
    run.log.emit("save_failed", step=1, error="No space left on device", seconds=0.1)
    assert saves() == 1
    # The stream lost its end: the next event is copied with those that are missing.
    entries = desk.client.connection.xrevrange(keys.events(run.id), count=1)
    log = run.log
    publish, log.publish = log.publish, None
    log.emit("save_failed", step=2, error="No space left on device", seconds=0.1)
    log.publish = publish
    run.step(3)
    assert saves() == 2
    assert entries


def test_a_running_training_shows_its_step_rate_loss_and_reward_until_it_ends(desk: Desk):
    desk.submit()
    run = desk.begin()
    labels = {"kind": "grpo", "job_id": run.id}
    assert value(desk, "warmd_training_step", **labels) is None
    run.step(1)
    run.step(2)
    assert value(desk, "warmd_training_step", **labels) == 2
    assert value(desk, "warmd_training_loss", **labels) == 0.5
    assert value(desk, "warmd_training_reward", **labels) == 0.5
    assert (value(desk, "warmd_training_steps_per_second", **labels) or 0) > 0
    run.log.emit("step", step=3, steps_total=4, loss=math.nan)
    assert math.isnan(value(desk, "warmd_training_loss", **labels) or 0)
    assert value(desk, "warmd_training_reward", **labels) is None
    run.finish({})
    assert value(desk, "warmd_training_step", **labels) is None


@pytest.mark.slow
def test_the_oldest_waiting_job_is_found_behind_those_at_the_front(desk: Desk):
    def oldest() -> float:
        found = value(desk, "warmd_queue_oldest_waiting_seconds", queue="train")
        assert found is not None
        return found

    assert oldest() == 0
    first = desk.submit()
    desk.submit("--front")
    assert 0 < oldest() < 30
    connection = desk.client.connection
    connection.hset(f"rq:job:{first}", "enqueued_at", "2020-01-01T00:00:00.000000Z")
    assert oldest() > 100_000_000
    for damage in ("", "no time"):
        connection.hset(f"rq:job:{first}", "enqueued_at", damage)
        assert 0 < oldest() < 30


@pytest.mark.slow
def test_a_job_that_waits_for_a_node_with_labels_counts_as_waiting(desk: Desk):
    job_id = desk.submit("--needs", "gpu=h200")
    connection = desk.client.connection
    popped: Any = connection.lmove("rq:queue:train", keys.taken("w"), "LEFT", "RIGHT")
    assert desk.client.store.set_aside(popped, TRAIN, "w", {"gpu": "h200"})
    connection.hset(f"rq:job:{job_id}", "enqueued_at", "2020-01-01T00:00:00.000000Z")
    found = value(desk, "warmd_queue_oldest_waiting_seconds", queue="train")
    assert found is not None
    assert found > 100_000_000


def test_disk_memory_and_redis_are_measured(desk: Desk):
    for folder in ("home", "runs"):
        assert (value(desk, "warmd_disk_free_bytes", folder=folder) or 0) > 0
        assert (value(desk, "warmd_disk_used_bytes", folder=folder) or 0) > 0
    size = value(desk, "warmd_memory_size_bytes") or 0
    assert 0 < (value(desk, "warmd_memory_available_bytes") or 0) < size
    assert (value(desk, "warmd_redis_memory_used_bytes") or 0) > 0
    assert value(desk, "warmd_redis_memory_limit_bytes") == 0
    assert NodeRegistry(desk.client.connection).all() == []
    assert value(desk, "warmd_nodes", state="silent") == 0
    totals.restarted(desk.client.connection, "zygote")
    assert value(desk, "warmd_process_restarts_total", process="zygote") == 1
    assert value(desk, "warmd_process_restarts_total", process="worker") == 0
