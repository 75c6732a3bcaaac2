"""What a submission may ask for: each field of `Queueing` is offered everywhere."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace
from datetime import UTC, datetime

import pytest
from shell import warmd

from warmd.daemon.api.session import Session
from warmd.daemon.lifecycle.queueing import AT_ONCE, Queueing

OPTIONS = {"tags": "--tag", "delay_s": "--in", "timeout_s": "--timeout"}
# A curriculum begins at once: its stages follow each other.
NOT_OF_CURRICULA = {"after", "at"}
# Of a notebook: `at` is a time of Python's own.
NOT_OF_SESSIONS = {"delay_s"}
EVERY = Queueing(
    name="n",
    tags=("t",),
    front=True,
    after="grpo-20260101-000000-aaaa",
    at=datetime(2026, 1, 1, tzinfo=UTC),
    retries=2,
    timeout_s=3.0,
    needs={"gpu": "h200"},
)
NAMES = [field.name for field in fields(Queueing)]


@pytest.mark.parametrize("name", NAMES)
def test_each_field_is_an_option_of_submit(name, tmp_path):
    assert OPTIONS.get(name, f"--{name}") in warmd("submit", "grpo", "--help", home=tmp_path).out


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_OF_SESSIONS])
def test_each_field_is_a_parameter_of_the_python_interface(name):
    assert name in inspect.signature(Session.submit).parameters
    assert name in inspect.signature(Session.sweep).parameters
    is_offered = name in inspect.signature(Session.curriculum).parameters
    assert is_offered == (name not in NOT_OF_CURRICULA)


def test_all_but_the_labels_is_stored_and_read_back():
    assert Queueing.from_json(EVERY.to_json()) == replace(EVERY, name=None, tags=())
    assert {*EVERY.to_json(), "name", "tags", "delay_s"} == set(NAMES)


def test_parts_that_an_earlier_version_has_not_stored_have_their_defaults():
    assert Queueing.from_json({}) == AT_ONCE
    assert Queueing.from_json({"front": True, "retries": 1}) == Queueing(front=True, retries=1)


def test_numbers_of_another_type_are_those_that_an_earlier_version_took():
    assert Queueing.from_json({"front": 1, "retries": 2.0}) == Queueing(front=True, retries=2)
    assert Queueing.from_json({"front": 0, "retries": True}) == Queueing(retries=1)
    found = Queueing.from_json({"timeout_s": 30, "needs": None})
    assert (found.timeout_s, found.needs) == (30.0, {})
    seconds = [Queueing.from_json({"timeout_s": text}).timeout_s for text in ("1h", "30")]
    assert seconds == [3600.0, 30.0]


@pytest.mark.parametrize(
    "stored",
    [
        {"front": "yes"},
        {"retries": []},
        {"at": 5},
        {"at": "soon"},
        {"timeout_s": "x"},
        {"needs": {"gpu": 2}},
    ],
)
def test_a_damaged_part_is_named(stored):
    with pytest.raises(ValueError, match=next(iter(stored))):
        Queueing.from_json(stored)


def test_a_delay_becomes_a_time_by_the_clock_of_redis():
    assert Queueing(delay_s=60.0).begun_at(1_000.0) == Queueing(
        at=datetime.fromtimestamp(1_060.0, UTC)
    )
