"""Nodes in Redis: heartbeats by Redis' clock, requests to leave, and one leader."""

from __future__ import annotations

from typing import Any

import pytest
from workplaces import Workplace

from warmd.daemon.queue import keys
from warmd.daemon.queue.election import LEASE_S, Election, leader
from warmd.daemon.queue.nodes import NodeRecord, NodeRegistry
from warmd.jobs.errors import NotFound, SpecError


def record(**changes: Any) -> NodeRecord:
    fields: dict[str, Any] = {
        "machine": "gpu7",
        "version": "0.1.0",
        "schema": 1,
        "labels": {"gpu": "h200"},
        "queues": {"train": 1},
        "pid": 7,
        "home": "/home",
        "state": "ready",
        "jobs": [],
        "jobs_taken": 0,
    }
    return NodeRecord(**{**fields, **changes})


def test_a_node_is_listed_with_its_heartbeat_until_it_leaves(place: Workplace):
    registry = NodeRegistry(place.connection)
    assert registry.beat("gpu7-a", record(jobs=["grpo-1"])) is False
    (node,) = registry.all()
    assert (node.name, node.state, node.jobs) == ("gpu7-a", "ready", ["grpo-1"])
    assert abs(node.heartbeat - place.store.clock()) < 5
    registry.remove("gpu7-a")
    assert registry.all() == []


def test_a_heartbeat_that_arrives_after_the_node_has_left_is_refused(place: Workplace):
    registry = NodeRegistry(place.connection)
    registry.beat("gpu7-a", record(), run="first")
    registry.leave("gpu7-a", "first")
    registry.beat("gpu7-a", record(), run="first")
    assert registry.all() == []
    registry.beat("gpu7-a", record(), run="second")
    assert [node.name for node in registry.all()] == ["gpu7-a"]


def test_a_node_without_heartbeats_is_silent_and_after_a_day_not_listed(place: Workplace):
    registry = NodeRegistry(place.connection)
    for name in ("gpu7-a", "gpu7-b", "gpu7-c"):
        registry.beat(name, record())
    now = place.store.clock()
    place.connection.zadd(keys.NODE_BEATS, {"gpu7-b": now - 60, "gpu7-c": now - 90_000})
    assert [node.state for node in registry.all()] == ["ready", "silent", "silent"]
    registry.forget_old()
    assert [node.name for node in registry.all()] == ["gpu7-a", "gpu7-b"]


def test_a_request_to_leave_is_read_with_the_next_heartbeat_until_it_is_withdrawn(
    place: Workplace,
):
    registry = NodeRegistry(place.connection)
    registry.beat("gpu7-a", record())
    assert place.client.nodes.drain("gpu7").name == "gpu7-a"
    assert registry.beat("gpu7-a", record()) is True
    assert registry.all()[0].is_draining
    registry.withdraw_drain("gpu7-a")
    assert registry.beat("gpu7-a", record()) is False


def test_a_node_is_named_by_a_unique_prefix(place: Workplace):
    registry = NodeRegistry(place.connection)
    with pytest.raises(NotFound, match="there are none"):
        registry.find("gpu7")
    for name in ("gpu7-a", "gpu7-ab", "gpu8"):
        registry.beat(name, record())
    assert registry.find("gpu7-a").name == "gpu7-a"
    assert registry.find("gpu8").name == "gpu8"
    with pytest.raises(SpecError, match="node: must name one node, got 'gpu7'"):
        registry.find("gpu7")
    with pytest.raises(SpecError):
        registry.find("gpu")
    with pytest.raises(NotFound):
        registry.find("")


def test_records_of_other_versions_and_garbage_do_not_hide_the_others(place: Workplace):
    registry = NodeRegistry(place.connection)
    registry.beat("gpu7-a", record())
    for name, raw in (("b", b"\xff"), ("c", b"[]"), ("d", b'{"version": "9"}')):
        place.connection.hset(keys.NODES, name, raw)
        place.connection.zadd(keys.NODE_BEATS, {name: place.store.clock()})
    assert [node.name for node in registry.all()] == ["gpu7-a"]


def test_exactly_one_candidate_leads_and_the_next_one_when_it_resigns(place: Workplace):
    first, second = (Election(place.connection, name) for name in ("a", "b"))
    assert first.is_leader()
    assert not second.is_leader()
    assert first.was_leader()
    assert leader(place.connection) == "a"
    second.resign()  # of what it does not hold
    assert leader(place.connection) == "a"
    first.resign()
    third = Election(place.connection, "c")
    assert third.is_leader()
    assert not first.was_leader()


def test_a_lost_leader_is_replaced_when_its_lease_expires_in_redis(
    place: Workplace,
):
    assert Election(place.connection, "a").is_leader()
    left_s: Any = place.connection.pttl(keys.LEADER)
    assert 0 < left_s <= LEASE_S * 1000
    place.connection.pexpire(keys.LEADER, 1)
    while place.connection.exists(keys.LEADER):
        pass
    assert Election(place.connection, "b").is_leader()


def test_a_candidate_queries_redis_a_few_times_per_lease(place: Workplace):
    candidate = Election(place.connection, "a")
    assert candidate.is_leader()
    place.connection.delete(keys.LEADER)
    assert candidate.is_leader()  # as of a moment ago
    assert leader(place.connection) is None
