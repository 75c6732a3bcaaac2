"""Jobs of dead workers are requeued, whichever process is killed at any time."""

from __future__ import annotations

from typing import Any

import pytest
from rq import Queue
from rq.executions import Execution
from rq.job import Job
from workplaces import NAME, Workplace

from warmd.daemon.queue import keys, others
from warmd.daemon.queue.claims import StartedExecution


def pop(place: Workplace, worker: str = NAME) -> Any:
    queue = place.store.queue("infer").key
    return place.connection.lmove(queue, keys.taken(worker), "LEFT", "RIGHT")


def begin(place: Workplace, worker: str = NAME) -> StartedExecution:
    begun = place.store.begin(pop(place, worker), "infer", worker)
    assert begun is not None
    return begun[1]


def test_jobs_are_requeued_although_the_requeuing_worker_was_killed(place: Workplace):
    place.registry.register(NAME, "infer", lease_s=0.001)
    kept, lost = place.submit(), place.submit()
    claim = begin(place).claim
    begin(place)
    assert place.registry.reclaim(NAME, "infer", spare=[claim]) == [lost]
    assert place.registry.silent() == {NAME: "infer"}  # killed here, it is known to be dead
    assert place.registry.requeue_orphans(NAME, "infer") == [kept]
    assert [place.status(job_id) for job_id in (kept, lost)] == ["queued", "queued"]
    assert place.registry.workers() == {}


def test_jobs_of_unregistered_workers_are_requeued(place: Workplace):
    begun, popped = place.submit(), place.submit()
    begin(place)
    pop(place, "infer-0:elsewhere:2")
    assert sorted(place.registry.requeue_unregistered()) == sorted([begun, popped])
    assert [place.status(job_id) for job_id in (begun, popped)] == ["queued", "queued"]
    assert place.registry.requeue_unregistered() == []


def test_jobs_of_registered_or_leased_workers_are_not_requeued(place: Workplace):
    place.submit(), place.submit()
    place.registry.register(NAME, "infer", lease_s=0.001)
    begin(place)
    leased = "infer-0:elsewhere:2"
    place.registry.register(leased, "infer", lease_s=60)
    place.connection.hdel(keys.WORKERS, leased)
    pop(place, leased)
    assert place.registry.requeue_unregistered() == []


def test_garbage_in_workers_lists_does_not_stop_the_requeuing(place: Workplace):
    place.connection.zadd("rq:wip:infer", {b"\xff:a:b": 1, b"no-colon": 2})
    place.connection.rpush(keys.taken("nobody"), b"\xff", "no-job")
    job_id = place.submit()
    begin(place)
    assert place.registry.requeue_unregistered() == [job_id]
    assert place.connection.zcard("rq:wip:infer") == 0


def test_a_job_that_a_killed_rq_worker_had_popped_is_requeued_at_the_second_check(
    place: Workplace,
):
    queue = place.store.queue("infer")
    job_id = place.submit()
    place.connection.lmove(queue.key, queue.intermediate_queue_key, "LEFT", "RIGHT")
    assert place.registry.requeue_unregistered() == []  # the worker may live
    assert place.registry.requeue_unregistered() == [job_id]
    assert place.connection.lrange(queue.key, 0, -1) == [job_id.encode()]
    assert place.registry.requeue_unregistered() == []


def test_running_jobs_of_another_application_are_not_requeued(place: Workplace):
    queue = Queue("infer", connection=place.connection)
    running = queue.enqueue("builtins.print", "a")
    popped = queue.enqueue("builtins.print", "b")
    registry = running.started_job_registry
    place.connection.delete(queue.key)
    place.connection.lpush(queue.intermediate_queue_key, popped.id)
    with place.connection.pipeline() as pipeline:
        Execution.create(running, 60, pipeline, worker_name="rq-worker")
        pipeline.execute()
    for _ in range(3):
        assert place.registry.requeue_unregistered() == []
    assert registry.get_job_ids() == [running.id]
    assert queue.job_ids == []


@pytest.mark.parametrize(
    "text",
    [
        "grpo-20260101-000000-aaaa",
        "a-20260101-000000-aaaa",
        "a123456789012345-20260101-000000-2z2z",
        "a1234567890123456-20260101-000000-2z2z",
        "1a-20260101-000000-aaaa",
        "grpo-2026010-000000-aaaa",
        "grpo-20260101-000000-aaaaa",
        "grpo-20260101-000000-aaa\n",
        "7c1a5a6e-6d3b-4b0f-9f0e-0d7b7a1f2f11",
        "daily-report",
    ],
)
def test_ids_are_told_apart_in_redis_as_in_the_worker(place: Workplace, text: str):
    place.connection.rpush(place.store.queue("infer").key, text)
    place.connection.hset(Job.key_for(text), "status", "queued")
    is_other = bool(others.among(place.connection, [text.encode()]))
    popped, num_others = others.take_from_between(place.connection, "infer", NAME)
    assert (popped, num_others) == ((None, 1) if is_other else (text.encode(), 0))
