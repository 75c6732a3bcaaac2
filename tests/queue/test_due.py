"""Jobs that wait for their time and for others, by Redis' clock and in few round trips."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest
from breadth import mostly_slow
from waiting import wait_until
from workplaces import NAME, Workplace

from warmd.daemon.queue import keys
from warmd.daemon.queue.due import DueJobs


def run(place: Workplace, job_id: str, how: str = "finish") -> None:
    """Do what a worker does for the next job, which is this one."""
    queue = place.store.queue("infer").key
    popped: Any = place.connection.lmove(queue, keys.taken(NAME), "LEFT", "RIGHT")
    begun = place.store.begin(popped, "infer", NAME)
    assert begun is not None
    job, execution = begun[0], begun[1].claim
    assert job.id == job_id
    if how == "finish":
        place.store.finish(job, execution)
    else:
        place.store.fail(job, execution, "broken")


def soon(seconds: float = 1.0) -> datetime:
    return datetime.now().astimezone() + timedelta(seconds=seconds)


def move_until(place: Workplace, job_id: str, status: str) -> None:
    """Repeat the supervisor's check until the job has a status."""
    due = DueJobs(place.store)

    def is_there() -> bool:
        due.enqueue()
        return place.status(job_id) == status

    wait_until(is_there, timeout_s=5)


def test_a_job_is_due_at_its_time_and_not_at_the_whole_second_before(place: Workplace):
    at = datetime.fromtimestamp(int(place.store.clock()) + 1.9).astimezone()
    job_id = place.submit(at=at)
    move_until(place, job_id, "queued")
    assert place.store.clock() >= at.timestamp()


@pytest.mark.slow
def test_a_scheduled_job_with_a_dependency_waits_for_both_if_its_time_comes_first(
    place: Workplace,
):
    parent = place.submit()
    child = place.submit(after=parent, at=soon())
    assert place.status(child) == "scheduled"
    move_until(place, child, "deferred")
    assert place.client.jobs.get(child)["after"] == [parent]
    run(place, parent)
    assert place.status(child) == "queued"


@pytest.mark.slow
def test_a_scheduled_job_with_a_dependency_waits_for_both_if_the_dependency_ends_first(
    place: Workplace,
):
    parent = place.submit()
    child = place.submit(after=parent, at=soon(2.0))
    run(place, parent)
    DueJobs(place.store).enqueue()
    assert place.status(child) == "scheduled"
    move_until(place, child, "queued")


@pytest.mark.parametrize("is_due", mostly_slow([False, True], but=[True]))
def test_a_due_job_still_waits_for_its_failed_dependency(place: Workplace, is_due: bool):
    parent = place.submit()
    child = place.submit(after=parent, at=soon())
    if is_due:
        move_until(place, child, "deferred")
    run(place, parent, "fail")
    move_until(place, child, "deferred")
    place.client.jobs.resume(parent)
    run(place, parent)
    assert place.status(child) == "queued"


@pytest.mark.slow
def test_a_due_job_still_waits_for_its_canceled_dependency(
    place: Workplace,
):
    parent = place.submit()
    child = place.submit(after=parent, at=soon())
    alone = place.submit(after=parent)
    place.client.jobs.cancel(parent)
    move_until(place, child, "deferred")
    assert place.status(alone) == "deferred"
    place.client.jobs.resume(parent)
    run(place, parent)
    assert [place.status(job_id) for job_id in (child, alone)] == ["queued", "queued"]


@pytest.mark.slow
def test_an_unpaused_job_waits_again_for_its_time_and_dependency(place: Workplace):
    parent = place.submit()
    child = place.submit(after=parent, at=soon(2.0))
    place.client.jobs.pause(child)
    assert place.client.jobs.unpause(child) == "scheduled"
    move_until(place, child, "deferred")
    place.client.jobs.pause(child)
    assert place.client.jobs.unpause(child) == "deferred"
    run(place, parent)
    assert place.status(child) == "queued"


def test_deferred_job_whose_parent_was_removed_runs(place: Workplace):
    parent = place.submit()
    children = [place.submit(after=parent) for _ in range(3)]
    run(place, parent, "fail")
    place.client.jobs.remove(parent)
    for child in children:
        move_until(place, child, "queued")


def commands(place: Workplace) -> int:
    stats: Any = place.connection.info("stats")
    return int(stats["total_commands_processed"])


def cost_of_a_look(place: Workplace) -> int:
    before = commands(place)
    DueJobs(place.store).enqueue()
    return commands(place) - before


@pytest.mark.slow
def test_checking_for_due_jobs_takes_constant_time(place: Workplace):
    parent = place.submit()

    def wait_too(numbers: range) -> None:
        for number in numbers:
            place.store.enqueue(f"infer-20260101-000000-{number:04}", "infer", after=parent)

    wait_too(range(200))
    few = cost_of_a_look(place)
    wait_too(range(200, 400))
    assert cost_of_a_look(place) < 1.5 * few < 400


def test_a_delay_begins_at_the_time_of_redis(place: Workplace):
    job_id = place.submit(delay_s=100)
    due: Any = place.connection.zscore("rq:scheduled:infer", job_id)
    assert 98 <= due - place.store.clock() <= 100
