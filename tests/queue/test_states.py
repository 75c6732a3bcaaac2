"""The table of moves: the manual has it, and each move leads to the place that it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from workplaces import NAME, Workplace

from warmd.configs.queues import INFER
from warmd.daemon.queue import keys, listing
from warmd.daemon.queue.jobs import EndedJob, Job, JobStatus
from warmd.daemon.queue.states import ENDED, MOVES, REGISTRIES, WAITING, Move, move

ID = "infer-20260101-000000-aaaa"
MANUAL = Path(__file__).parents[2] / "docs" / "jobs.md"
PARTS = {status.value: status for status in REGISTRIES}


def row(name: str, found: Move) -> list[str]:
    places = dict.fromkeys(REGISTRIES[status] for status in found.to)
    return [
        name,
        ", ".join(f"`{status.value}`" for status in found.source),
        ", ".join(f"`{status.value}`" for status in found.to),
        ", ".join(places),
        ", ".join(found.index),
        found.counter or "",
    ]


def test_the_manual_has_the_table_of_moves():
    lines = MANUAL.read_text().splitlines()
    start = lines.index("| Move | From | To | Place | Indices | Counter |") + 2
    cells = [line.strip("|").split("|") for line in lines[start : start + len(MOVES)]]
    assert [[cell.strip() for cell in one] for one in cells] == [row(*one) for one in MOVES.items()]


def made(place: Workplace, status: JobStatus) -> tuple[Job, Any]:
    """A job with this status, and its claim if it is started."""
    store = place.store
    if status in ENDED:
        store.adopt_many([EndedJob(ID, INFER, status, 1.0, 2.0, 1, from_cli=False, needs={})])
    elif status == JobStatus.DEFERRED:
        store.enqueue("infer-20260101-000000-bbbb", INFER)
        store.enqueue(ID, INFER, after="infer-20260101-000000-bbbb")
    elif status == JobStatus.SCHEDULED:
        store.enqueue(ID, INFER)
        assert store.pause_waiting(fetched(place))
    else:
        store.enqueue(ID, INFER)
    if status == JobStatus.STARTED:
        return begin(place)
    return fetched(place), None


def fetched(place: Workplace) -> Job:
    job = place.store.fetch(ID)
    assert job is not None
    return job


def begin(place: Workplace) -> tuple[Job, Any]:
    popped: Any = place.connection.lmove(place.store.queue(INFER).key, keys.taken(NAME))
    found = place.store.begin(popped, INFER, NAME)
    assert found is not None
    return found[0], found[1].claim


def places_of(place: Workplace) -> list[str]:
    """Where the job is: the statuses under which it is listed."""
    return [one for one in listing.STATUSES if ID in listing.ids_with(place.connection, [one])]


STORE: dict[str, Callable[[Workplace, Job, Any], object]] = {
    "pause": lambda place, job, claim: place.store.pause_waiting(job),
    "unpause": lambda place, job, claim: place.store.unpause(job),
    "cancel": lambda place, job, claim: place.store.cancel_waiting(job),
    "begin": lambda place, job, claim: begin(place),
    "finish": lambda place, job, claim: place.store.finish(job, claim, {}),
    "fail": lambda place, job, claim: place.store.fail(job, claim, "no reason"),
    "stop": lambda place, job, claim: place.store.stop(job, claim, "no reason"),
    "requeue": lambda place, job, claim: place.store.requeue(job, claim),
    "retry": lambda place, job, claim: place.store.requeue(job, claim, retry_in_s=60.0),
    "resume": lambda place, job, claim: place.store.enqueue_again(job),
    "remove": lambda place, job, claim: place.store.remove(job),
}


@pytest.mark.parametrize("name", STORE)
def test_a_move_leads_from_each_of_its_states_to_the_place_in_the_table(place, name):
    found = MOVES[name]
    for source in found.source:
        place.connection.flushdb()
        job, claim = made(place, source)
        assert STORE[name](place, job, claim), source
        left = place.store.fetch(ID)
        if not found.to:
            assert (left, places_of(place)) == (None, []), source
            continue
        assert left is not None
        status = left.get_status(refresh=False)
        assert status in found.to, source
        kept = {REGISTRIES[PARTS[one]] for one in places_of(place) if one != "stopped"}
        assert kept == {REGISTRIES[status]}, source
        is_indexed = place.connection.zscore(keys.ANSWERS, ID) is not None
        assert is_indexed == ("ended" in found.index), source


def test_park_is_the_end_of_an_execution_whose_pause_was_requested(place):
    job, claim = made(place, JobStatus.STARTED)
    assert place.store.request_pause(job, "release")
    assert place.store.requeue(job, claim)
    assert places_of(place) == ["scheduled"]
    assert place.store.pause_of(job) == "release"


@pytest.mark.parametrize("name", [name for name, found in MOVES.items() if found.source])
def test_a_move_from_a_state_that_the_table_does_not_name_writes_nothing(place, name):
    for status in (*WAITING, *ENDED, JobStatus.STARTED):
        if status in MOVES[name].source:
            continue
        place.connection.flushdb()
        job, _ = made(place, status)
        before = everything(place)
        assert move(place.connection, job, name, lambda pipeline: pipeline.flushdb()) is None
        assert everything(place) == before


def everything(place: Workplace) -> dict[Any, Any]:
    return {key: place.connection.dump(key) for key in sorted(place.connection.keys())}
