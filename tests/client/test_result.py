"""The result of a job is on disk: where it is missing, an error names its place."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from workplaces import NAME, Workplace, workplace

from warmd.configs.queues import INFER
from warmd.daemon.queue import keys
from warmd.daemon.queue.nodes import READY, NodeRecord, NodeRegistry
from warmd.jobs.errors import NotFound


@pytest.fixture(scope="module")
def place() -> Iterator[Workplace]:
    with workplace() as made:
        yield made


def finished(place: Workplace) -> str:
    """A job that Redis has as finished, without result.json."""
    place.submit()
    popped: Any = place.connection.lmove(place.store.queue(INFER).key, keys.taken(NAME))
    begun = place.store.begin(popped, INFER, NAME)
    assert begun is not None
    assert place.store.finish(begun[0], begun[1].claim)
    return str(begun[0].id)


def test_the_result_is_read_from_disk_and_redis_has_no_copy(place: Workplace):
    job_id = finished(place)
    place.client.rundir(job_id).write_result({"text": "b"}, revision=1)
    assert place.client.jobs.result(job_id) == {"text": "b"}
    record = place.store.fetch(job_id)
    assert record is not None
    found = record.latest_result()
    assert found is not None
    assert found.return_value is None


def test_a_job_that_has_not_ended_has_no_result(place: Workplace):
    assert place.client.jobs.result(place.submit()) is None


def test_a_result_that_was_removed_is_named_with_the_command_that_restores_it(place: Workplace):
    job_id = finished(place)
    path = place.client.rundir(job_id).path / "result.json"
    advice = rf"{path} was removed or is damaged: `warmd resume {job_id}`"
    with pytest.raises(NotFound, match=advice):
        place.client.jobs.result(job_id)


def test_a_run_directory_that_is_not_here_is_looked_for_on_the_nodes(place: Workplace):
    job_id = finished(place)
    shutil.rmtree(place.client.rundir(job_id).path)
    other = NodeRecord(
        machine="elsewhere",
        version="1",
        schema=1,
        labels={},
        queues={},
        pid=1,
        home="/their/home",
        state=READY,
        jobs=[],
        jobs_taken=0,
    )
    NodeRegistry(place.connection).beat("other", other)
    with pytest.raises(NotFound, match=r"/runs has no run directory .*; elsewhere: /their/home"):
        place.client.jobs.result(job_id)


def test_a_job_that_nobody_knows_is_not_found(place: Workplace):
    with pytest.raises(NotFound, match="no job"):
        place.client.jobs.result("infer-20260101-000000-aaaa")
