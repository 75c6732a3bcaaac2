"""The table of moves: the manual has it, and each move leads to the place that it names."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from killed import killed_at_command
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


def kept_in(place: Workplace) -> set[str]:
    """The registries that have the job."""
    return {REGISTRIES[PARTS[one]] for one in places_of(place) if one != "stopped"}


NEW: dict[str, Any] = {
    "front": False,
    "after": None,
    "at": None,
    "retries": 0,
    "timeout_s": None,
    "from_cli": False,
    "needs": {},
    "created_at": 1.0,
    "executions": 0,
    "paused_at": None,
    "is_deferred": False,
}
RECORDED = EndedJob(ID, INFER, JobStatus.FAILED, 1.0, 2.0, 1, from_cli=False, needs={})


def submit(place: Workplace) -> bool:
    place.store.enqueue(ID, INFER)
    return True


def end_in_a_park(place: Workplace, job: Job, claim: Any) -> bool:
    return place.store.request_pause(job, "release") and place.store.requeue(job, claim)


def set_aside(place: Workplace, job: Job, claim: Any) -> bool:
    popped: Any = place.connection.lmove(place.store.queue(INFER).key, keys.taken(NAME))
    return popped is not None and place.store.set_aside(popped, INFER, NAME, {"disk": "big"})


def let_time_come(place: Workplace, job: Job, claim: Any) -> bool:
    place.store.release(job)
    return fetched(place).get_status(refresh=False) != JobStatus.SCHEDULED


# Makes each move, from a job as `made` leaves it.
STORE: dict[str, Callable[[Workplace, Job, Any], object]] = {
    "submit": lambda place, job, claim: submit(place),
    "restore": lambda place, job, claim: place.store.restore(ID, INFER, **NEW),
    "record": lambda place, job, claim: place.store.adopt_many([RECORDED]),
    "set aside": set_aside,
    "release": let_time_come,
    "defer": let_time_come,
    "pause": lambda place, job, claim: place.store.pause_waiting(job),
    "unpause": lambda place, job, claim: place.store.unpause(job),
    "cancel": lambda place, job, claim: place.store.cancel_waiting(job),
    "begin": lambda place, job, claim: begin(place),
    "request": lambda place, job, claim: place.store.request_stop(job, "cancel"),
    "finish": lambda place, job, claim: place.store.finish(job, claim),
    "fail": lambda place, job, claim: place.store.fail(job, claim, "no reason"),
    "stop": lambda place, job, claim: place.store.stop(job, claim, "no reason"),
    "requeue": lambda place, job, claim: place.store.requeue(job, claim),
    "retry": lambda place, job, claim: place.store.requeue(job, claim, retry_in_s=60.0),
    "park": end_in_a_park,
    "resume": lambda place, job, claim: place.store.enqueue_again(job),
    "remove": lambda place, job, claim: place.store.remove(job),
}


def sources(name: str) -> tuple[JobStatus | None, ...]:
    """Where a move begins; a time that has come leads to a wait only with dependencies."""
    return MOVES[name].source or (None,)


def prepared(place: Workplace, name: str, source: JobStatus | None) -> tuple[Any, Any]:
    """An empty Redis with a job where the move begins, and its claim if it is started."""
    place.connection.flushdb()
    if source is None:
        return None, None
    if (name, source) == ("pause", JobStatus.SCHEDULED):
        place.store.enqueue(ID, INFER, at=datetime(2100, 1, 1, tzinfo=UTC))
        return fetched(place), None
    if name not in ("release", "defer"):
        return made(place, source)
    before = "infer-20260101-000000-bbbb"
    place.store.enqueue(before, INFER)
    at = datetime(2026, 1, 1, tzinfo=UTC)
    place.store.enqueue(ID, INFER, after=before, at=at if source == JobStatus.SCHEDULED else None)
    if name == "release":  # what it waits for has gone
        found = place.store.fetch(before)
        assert found is not None
        assert place.store.cancel_waiting(found)
        assert place.store.remove(found)
    return fetched(place), None


def test_every_move_of_the_table_is_made_here():
    assert list(STORE) == list(MOVES)


@pytest.mark.parametrize("name", STORE)
def test_a_move_leads_from_each_of_its_states_to_the_place_in_the_table(place, name):
    found = MOVES[name]
    for source in sources(name):
        job, claim = prepared(place, name, source)
        assert STORE[name](place, job, claim), source
        left = place.store.fetch(ID)
        if not found.to:
            assert (left, places_of(place)) == (None, []), source
            continue
        assert left is not None
        status = left.get_status(refresh=False)
        assert status in found.to, source
        assert kept_in(place) == {REGISTRIES[status]}, source
        is_indexed = place.connection.zscore(keys.ANSWERS, ID) is not None
        assert is_indexed == ("ended" in found.index), source


@pytest.mark.nightly(part="storms", catches="a move that a killed process leaves half made")
@pytest.mark.parametrize("name", STORE)
def test_a_process_that_is_killed_before_or_after_a_move_loses_and_doubles_nothing(place, name):
    """At each instant at which it talks to Redis; the move is made again, as after a restart."""
    for source in sources(name):
        job, claim = prepared(place, name, source)
        before = shape(place)
        STORE[name](place, job, claim)
        after = shape(place)
        assert after != before, source
        found, instant = set(), 1
        while True:
            job, claim = prepared(place, name, source)
            work = partial(STORE[name], place, job, claim)
            if not killed_at_command(instant, work):
                break
            if place.connection.exists(keys.taken(NAME)):
                assert place.registry.reclaim(NAME, INFER) == [ID]
            now = fetched(place) if place.store.fetch(ID) is not None else job
            if shape(place) != after:
                assert len(kept_in(place)) == (source is not None), (source, instant)
                assert STORE[name](place, now, claim), (source, instant)
                found.add("before")
            else:
                found.add("after")
            assert shape(place) == after, (source, instant)
            instant += 1
        assert found == {"before", "after"}, source


def shape(place: Workplace) -> dict[str, Any]:
    """All that Redis has, without times and random names."""
    found: Any = place.connection.keys()
    return {_plain(key): _shape(place.connection, key) for key in sorted(found)}


def _shape(redis: Any, key: bytes) -> Any:
    match _plain(redis.type(key)):
        case "hash":
            return {_plain(k): _plain(v) for k, v in sorted(redis.hgetall(key).items())}
        case "list":
            return [_plain(one) for one in redis.lrange(key, 0, -1)]
        case "set":
            return sorted(_plain(one) for one in redis.smembers(key))
        case "zset":
            return [_plain(one) for one in redis.zrange(key, 0, -1)]
        case "stream":
            return redis.xlen(key)
    return _plain(redis.get(key))


def _plain(raw: bytes) -> str:
    text = raw.decode(errors="backslashreplace")
    text = re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+Z?|\b\d{10}\.\d+|\b\d+\.\d{3,}", "TIME", text)
    text = re.sub(r"^(duration:\w+:\w+):[\d.]+$", r"\1:BUCKET", text)
    return re.sub(r"[0-9a-f]{32}", "NAME", text)


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
