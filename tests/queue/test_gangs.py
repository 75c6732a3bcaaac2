"""Gangs in Redis: one job gathers at a time, all seats or none; earlier gangs have no effect."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from breadth import mostly_slow
from waiting import wait_until
from workplaces import NAME, Workplace

from warmd.configs.config import WorkerConfig
from warmd.configs.labels import GANG_ADDRESS, GANG_SOFTWARE, NODES, line_of
from warmd.configs.queues import TRAIN
from warmd.daemon.host.messages import RunJob
from warmd.daemon.queue import keys
from warmd.daemon.queue.gangs import ENDED, STARTED, Gang, Gangs, Seat
from warmd.daemon.queue.keys import LEASE_S
from warmd.daemon.queue.nodes import NodeRecord, NodeRegistry
from warmd.daemon.work.held import Leaving
from warmd.daemon.work.taking import JobTaker
from warmd.jobs import spec_class
from warmd.jobs.errors import NotFound

LEADER, SECOND, THIRD, FOURTH = (f"train-0:{name}:1" for name in ("aaaa", "bbbb", "cccc", "dddd"))


@pytest.fixture
def place(shared_place: Workplace) -> Workplace:
    """The same for all tests, empty but for four workers that are alive."""
    shared_place.connection.flushdb()
    for worker in (LEADER, SECOND, THIRD, FOURTH):
        shared_place.connection.hset(keys.WORKERS, worker, TRAIN)
        shared_place.connection.set(keys.lease(worker), 1)
    return shared_place


@pytest.fixture
def gangs(place: Workplace) -> Gangs:
    return Gangs(place.connection)


def submit(place: Workplace) -> str:
    data = place.home.path / "rows.jsonl"
    data.write_bytes(b'{"prompt": "1 + 1", "answer": "2"}\n')
    values = {"dataset": str(data), "samples": 1, "reward": ["correctness"]}
    return place.client.jobs.submit(spec_class("grpo").parse(values))


def opened(gangs: Gangs, job_id: str, *, size: int = 2, leader: str = LEADER) -> str:
    token = gangs.open(job_id, leader, home_of(leader), {NODES: str(size)})
    assert token is not None
    return token


def home_of(worker: str) -> str:
    return worker.split(":")[1]


def join(gangs: Gangs, job_id: str, worker: str) -> str | None:
    return gangs.join(job_id, worker, home_of(worker), home_of(worker))


def begun(place: Workplace, gangs: Gangs, job_id: str, token: str) -> Any:
    """Begin an execution of a gang; return its claim."""
    popped: Any = place.connection.lmove(
        place.store.queue(TRAIN).key, keys.taken(LEADER), "LEFT", "RIGHT"
    )
    taken = place.store.begin(popped, TRAIN, LEADER)
    assert taken is not None
    assert gangs.begin(job_id, token, taken[1].number, taken[1].claim)
    return taken[1].claim


def seen(gangs: Gangs, job_id: str) -> Gang:
    found = gangs.gang(job_id)
    assert found is not None
    return found


def test_a_gang_begins_once_every_seat_has_a_node_of_its_own(place: Workplace, gangs: Gangs):
    job_id = submit(place)
    token = opened(gangs, job_id, size=3)
    assert join(gangs, job_id, LEADER) is None  # the leader has no second part
    assert join(gangs, job_id, THIRD) == token
    assert join(gangs, job_id, THIRD.replace("train-0", "train-1")) is None
    assert gangs.close(job_id, token) == 1
    assert seen(gangs, job_id).is_gathering
    assert join(gangs, job_id, SECOND) == token
    assert join(gangs, job_id, FOURTH) is None
    assert gangs.close(job_id, token) == 2
    claim = begun(place, gangs, job_id, token)
    gang = seen(gangs, job_id)
    assert gang.workers == [LEADER, SECOND, THIRD]
    assert (gang.execution, gang.claim, gang.has_claim) == (1, claim.composite_key, True)
    assert not gang.is_gathering
    assert gang.port is None
    assert gangs.listen(job_id, token, "127.0.0.1", 7)
    assert (seen(gangs, job_id).host, seen(gangs, job_id).port) == ("127.0.0.1", 7)
    assert not gangs.leave(job_id, token, SECOND)  # it has begun


def test_one_of_several_simultaneous_leaders_gathers(place: Workplace, gangs: Gangs):
    ids = [submit(place) for _ in range(8)]
    with ThreadPoolExecutor(len(ids)) as pool:
        tokens = list(pool.map(lambda job_id: gangs.open(job_id, LEADER, "a", {NODES: "2"}), ids))
    [first] = [job_id for job_id, token in zip(ids, tokens, strict=True) if token is not None]
    assert [job_id for job_id in ids if join(gangs, job_id, SECOND) is not None] == [first]
    gangs.dissolve(first, tokens[ids.index(first)] or "")
    other = next(job_id for job_id in ids if job_id != first)
    assert join(gangs, other, SECOND) is None
    opened(gangs, other)


def test_a_gathering_ends_when_its_leader_is_killed(place: Workplace, gangs: Gangs):
    job_id, other = submit(place), submit(place)
    token = opened(gangs, job_id)
    assert join(gangs, job_id, SECOND) == token
    assert gangs.open(other, THIRD, "cccc", {NODES: "2"}) is None
    assert 0 < place.connection.pttl(keys.GATHERING) <= LEASE_S * 1000
    place.connection.delete(keys.lease(LEADER))
    assert not seen(gangs, job_id).is_leader_alive  # its seats leave
    place.connection.pexpire(keys.GATHERING, 1)
    wait_until(lambda: not place.connection.exists(keys.GATHERING))
    opened(gangs, other, leader=THIRD)
    # The leader was not killed but suspended, and continues: its seats and its right to gather are
    # lost.
    assert gangs.close(job_id, token) == 1
    assert join(gangs, job_id, FOURTH) is None
    assert join(gangs, other, FOURTH) is not None


def test_a_leader_whose_death_its_node_has_reported_is_not_alive(place: Workplace, gangs: Gangs):
    job_id = submit(place)
    opened(gangs, job_id)
    assert seen(gangs, job_id).is_leader_alive
    place.connection.hdel(keys.WORKERS, LEADER)
    assert not seen(gangs, job_id).is_leader_alive


def test_a_seat_is_free_again_when_its_worker_has_no_lease(place: Workplace, gangs: Gangs):
    job_id = submit(place)
    token = opened(gangs, job_id, size=3)
    for worker in (SECOND, THIRD):
        assert join(gangs, job_id, worker) == token
    place.connection.pexpire(keys.lease(SECOND), 1)
    wait_until(lambda: not place.connection.exists(keys.lease(SECOND)))
    assert seen(gangs, job_id).alive == {LEADER, THIRD}
    assert gangs.close(job_id, token) == 1
    place.connection.set(keys.lease(SECOND), 1)  # it was suspended only
    assert not gangs.report(job_id, token, SECOND, Seat("bbbb", ENDED))
    assert gangs.close(job_id, token) == 1
    assert join(gangs, job_id, FOURTH) == token
    assert gangs.close(job_id, token) == 2
    assert seen(gangs, job_id).workers == [LEADER, THIRD, FOURTH]


def test_a_released_seat_is_not_taken_by_its_last_report(place: Workplace, gangs: Gangs):
    job_id = submit(place)
    token = opened(gangs, job_id)
    assert join(gangs, job_id, SECOND) == token
    assert gangs.leave(job_id, token, SECOND)
    assert not gangs.report(job_id, token, SECOND, Seat("bbbb", ENDED))
    assert gangs.close(job_id, token) == 0


def test_a_gang_of_an_earlier_execution_has_no_effect(place: Workplace, gangs: Gangs):
    job_id = submit(place)
    old = opened(gangs, job_id)
    assert join(gangs, job_id, SECOND) == old
    assert gangs.close(job_id, old) == 1
    begun(place, gangs, job_id, old)
    assert gangs.report(job_id, old, SECOND, Seat("bbbb", STARTED))
    assert place.registry.reclaim(LEADER, TRAIN) == [job_id]
    assert not seen(gangs, job_id).has_claim  # its seats end their ranks
    new = opened(gangs, job_id, leader=THIRD)
    assert join(gangs, job_id, FOURTH) == new
    # What the earlier leader and its seat still do:
    assert gangs.close(job_id, old) == -1
    assert not gangs.listen(job_id, old, "127.0.0.1", 7)
    assert not gangs.report(job_id, old, SECOND, Seat("bbbb", ENDED))
    assert not gangs.leave(job_id, old, FOURTH)
    assert not gangs.end(job_id, old)
    gangs.dissolve(job_id, old)
    gang = seen(gangs, job_id)
    assert (gang.token, gang.workers) == (new, [THIRD, FOURTH])
    assert (gang.execution, gang.port, gang.is_ending) == (None, None, False)
    assert gang.is_gathering


def test_a_job_that_no_longer_waits_does_not_gather(place: Workplace, gangs: Gangs):
    job_id = submit(place)
    token = opened(gangs, job_id)
    assert place.client.jobs.cancel(job_id) == "canceled"
    assert gangs.close(job_id, token) == -1


def test_a_gang_stays_only_while_its_leader_renews_it(place: Workplace, gangs: Gangs):
    job_id = submit(place)
    token = opened(gangs, job_id)
    place.connection.pexpire(keys.gang(job_id), 5_000)
    gangs.gang(job_id, renew=True)
    assert place.connection.pttl(keys.gang(job_id)) > 5_000
    place.connection.pexpire(keys.gang(job_id), 1)
    wait_until(lambda: gangs.gang(job_id) is None)
    assert gangs.close(job_id, token) == -1
    assert not gangs.report(job_id, token, SECOND, Seat("bbbb", STARTED))


def node(**changes: Any) -> NodeRecord:
    fields: dict[str, Any] = {
        "machine": "a", "version": "0.1.0", "schema": 1, "labels": {GANG_ADDRESS: "10.0.0.1"},
        "queues": {TRAIN: 1}, "pid": 7, "home": "/home", "state": "ready", "jobs": ["x"],
        "jobs_taken": 1,
    }  # fmt: skip
    return NodeRecord(**{**fields, **changes})


def test_nodes_count_for_a_gang_if_they_may_take_a_seat_now_or_later(
    place: Workplace, gangs: Gangs
):
    registry = NodeRegistry(place.connection)
    for name, record in {
        "busy": node(),
        "labeled": node(labels={GANG_ADDRESS: "10.0.0.2", "rack": "3"}),
        "private": node(labels={}),
        "starting": node(state="starting"),
        "infers": node(queues={"infer": 1}),
    }.items():
        registry.beat(name, record)
    assert gangs.num_suitable({NODES: "2"}) == 2
    assert gangs.num_suitable({NODES: "2", "rack": "3"}) == 1
    assert gangs.may_gather({NODES: "2"})
    assert not gangs.may_gather({NODES: "3"})
    job_id = submit(place)
    token = opened(gangs, job_id)
    assert not gangs.may_gather({NODES: "2"})  # another job gathers
    gangs.give_up(job_id, token, {NODES: "2"}, pause_s=0.05)
    assert not gangs.may_gather({NODES: "2"})  # its attempt just now failed
    wait_until(lambda: gangs.may_gather({NODES: "2"}))


def test_nodes_of_another_version_do_not_count(place: Workplace, gangs: Gangs):
    registry = NodeRegistry(place.connection)
    for name, software in {"a": "1-x", "b": "1-x", "c": "2-y"}.items():
        labels = {GANG_ADDRESS: "10.0.0.1", GANG_SOFTWARE: software}
        registry.beat(name, node(labels=labels))
    assert gangs.num_suitable({NODES: "3"}) == 2
    assert gangs.may_gather({NODES: "2", GANG_SOFTWARE: "1-x"})
    assert not gangs.may_gather({NODES: "2", GANG_SOFTWARE: "2-y"})
    assert not gangs.may_gather({NODES: "3"})


def test_an_execution_does_not_begin_without_a_node_that_left_just_before(
    place: Workplace, gangs: Gangs
):
    job_id = submit(place)
    token = opened(gangs, job_id)
    assert join(gangs, job_id, SECOND) == token
    assert gangs.close(job_id, token) == 1
    assert gangs.leave(job_id, token, SECOND)
    popped: Any = place.connection.lmove(
        place.store.queue(TRAIN).key, keys.taken(LEADER), "LEFT", "RIGHT"
    )
    taken = place.store.begin(popped, TRAIN, LEADER)
    assert taken is not None
    assert not gangs.begin(job_id, token, taken[1].number, taken[1].claim)
    assert seen(gangs, job_id).execution is None


def test_a_leader_that_was_suspended_does_not_take_the_turn_of_another(
    place: Workplace, gangs: Gangs
):
    job_id, other = submit(place), submit(place)
    token = opened(gangs, job_id)
    place.connection.delete(keys.GATHERING)  # it has expired
    opened(gangs, other, leader=THIRD)
    assert gangs.close(job_id, token) == -1
    assert join(gangs, other, FOURTH) is not None
    assert join(gangs, job_id, SECOND) is None


@pytest.mark.parametrize(
    "seat",
    mostly_slow(
        ["", "x", "[]", "{}", '{"node": 7}', '{"node": "bbbb", "state": "joined", "new": 1}'],
        but=["x", '{"node": "bbbb", "state": "joined", "new": 1}'],
    ),
)
def test_a_record_that_is_not_valid_or_of_a_later_version_is_no_error(
    place: Workplace, gangs: Gangs, seat: str
):
    job_id = submit(place)
    opened(gangs, job_id)
    place.connection.hset(keys.gang(job_id), f"seat {SECOND}", seat)
    assert list(seen(gangs, job_id).seats) == ([SECOND] if "new" in seat else [])
    place.connection.hset(keys.gang(job_id), "size", "many")
    assert gangs.gang(job_id) is None
    assert place.client.jobs.get(job_id)["status"] == "queued"


def test_a_seat_counts_for_max_jobs_when_the_execution_begins(place: Workplace, gangs: Gangs):
    """It is no reason to leave before: then a node for one job would never take part."""
    config = WorkerConfig(name="train-0", queue=TRAIN)
    held = place.held(place.store, config, {GANG_ADDRESS: "127.0.0.1"})
    seats, leaving = held.gangs.seats, Leaving(held, max_jobs=1)
    job_id = submit(place)
    place.connection.hset(keys.WORKERS, NAME, TRAIN)
    place.connection.set(keys.lease(NAME), 1)
    token = opened(gangs, job_id)

    def request(job: Any) -> RunJob:
        return RunJob(job.id, NAME, "", 0, slots=1, threads=1, niceness=0, enqueued_at=None)

    def advance() -> None:
        seats.advance(is_stopping=False, is_closing=leaving.is_closing())

    assert seats.take(job_id, {}, request) is not None
    advance()
    assert (leaving.num_jobs, leaving.is_closing()) == (0, False)
    assert gangs.close(job_id, token) == 1
    begun(place, gangs, job_id, token)
    assert gangs.listen(job_id, token, "127.0.0.1", 7)
    for _ in range(2):
        advance()
        assert (leaving.num_jobs, leaving.is_closing()) == (1, True)
    assert [seat.settle for seat in seats.taken] == [None]


@pytest.mark.parametrize(
    "error",
    [
        NotFound("gone"),
        *mostly_slow([OSError("stale"), KeyError("path"), TypeError("unknown field")], but=()),
    ],
)
def test_a_job_that_cannot_be_read_gets_no_seat(place: Workplace, gangs: Gangs, error: Exception):
    held = place.held(
        place.store, WorkerConfig(name="train-0", queue=TRAIN), {GANG_ADDRESS: "127.0.0.1"}
    )
    job_id = submit(place)
    opened(gangs, job_id)

    def request(job: Any) -> RunJob:
        raise error

    assert held.gangs.seats.take(job_id, {}, request) is None
    assert seen(gangs, job_id).seats == {}


def test_a_node_of_another_version_gets_no_seat(place: Workplace, gangs: Gangs):
    held = place.held(
        place.store, WorkerConfig(name="train-0", queue=TRAIN), {GANG_ADDRESS: "127.0.0.1"}
    )
    job_id = submit(place)
    needs = {NODES: "2", GANG_SOFTWARE: "1-x"}
    assert gangs.open(job_id, LEADER, home_of(LEADER), needs) is not None

    def request(job: Any) -> RunJob:
        return RunJob(job.id, NAME, "", 0, slots=1, threads=1, niceness=0, enqueued_at=None)

    seats = held.gangs.seats
    assert seats.take(job_id, {GANG_SOFTWARE: "2-y"}, request) is None
    assert seats.take(job_id, {GANG_SOFTWARE: "1-x"}, request) is not None


@pytest.mark.parametrize("is_damaged", mostly_slow([False, True], but=[True]))
def test_a_job_of_several_nodes_that_cannot_be_read_fails_instead_of_gathering(
    place: Workplace, gangs: Gangs, is_damaged: bool
):
    registry = NodeRegistry(place.connection)
    for name in ("a", "b"):
        registry.beat(name, node())
    job_id, labels = submit(place), {GANG_ADDRESS: "127.0.0.1"}
    needs = {NODES: "2"}
    place.connection.hset(f"rq:job:{job_id}", keys.FIELD_NEEDS, line_of(needs))
    popped: Any = place.connection.lmove(
        place.store.queue(TRAIN).key, keys.taken(NAME), "LEFT", "RIGHT"
    )
    assert place.store.set_aside(popped, TRAIN, NAME, needs)
    if is_damaged:
        (place.client.rundir(job_id).path / "spec.json").write_text("{")
    held = place.held(place.store, WorkerConfig(name="train-0", queue=TRAIN), labels)
    JobTaker(held, Leaving(held, max_jobs=None), labels).take()
    if not is_damaged:
        assert seen(gangs, job_id).is_gathering
        return
    assert gangs.gang(job_id) is None
    [attempt] = held.attempts
    assert attempt.settle is not None
    attempt.settle()
    job = place.store.fetch(job_id)
    assert job is not None
    assert job.get_status() == "failed"
    result = job.latest_result()
    assert result is not None
    assert "spec.json: cannot be read" in str(result.exc_string)
