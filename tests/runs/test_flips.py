"""Flipped bits in spec.json, result.json and events.jsonl: noticed, or without effect."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest
from flips import flipped

from warmd.daemon.runs import events
from warmd.daemon.runs.events import EventLog
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs import stored_options
from warmd.jobs.errors import Conflict

RESULT = {"steps": 3, "reward": 0.25, "model": "model"}


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    (tmp_path / "runs").mkdir()
    made = RunDir.create(tmp_path / "runs", "grpo", {"spec": {"samples": 4, "model": "demo"}})
    made.write_result(RESULT, revision=1)
    with EventLog(made.events, execution=1) as log:
        for step in (1, 2):
            log.emit("step", step=step, loss=0.5)
    return made


def test_a_spec_with_a_flipped_bit_is_refused_or_unchanged(rundir: RunDir):
    whole, refused = rundir.read_spec(), 0
    for _ in flipped(rundir.path / "spec.json"):
        try:
            assert rundir.read_spec() == whole
        except Conflict:
            refused += 1
    assert refused > 100
    assert rundir.read_spec() == whole


def test_a_result_with_a_flipped_bit_is_none_or_unchanged(rundir: RunDir):
    for _ in flipped(rundir.path / "result.json"):
        assert rundir.read_result() in (None, RESULT)
    assert rundir.read_result() == RESULT


def test_every_event_has_its_fields_whatever_bit_is_flipped(rundir: RunDir):
    for _ in flipped(rundir.events):
        for event in events.read(rundir.events):
            assert type(event["seq"]) is type(event["execution"]) is int
            assert isinstance(event["time"], int | float)
            assert event["type"] != "step" or type(event["step"]) is int


def test_a_spec_of_an_earlier_version_has_no_digest_and_is_read(rundir: RunDir):
    path = rundir.path / "spec.json"
    document = orjson.loads(path.read_bytes())
    del document["digest"]
    path.write_bytes(orjson.dumps(document))
    assert rundir.read_spec() == document | {"spec": stored_options("grpo", document["spec"])}
    rundir.revise(model={"name": "demo"})
    assert "digest" in orjson.loads(path.read_bytes())
    assert rundir.read_spec()["revision"] == 2


def test_show_says_that_a_spec_is_damaged(desk):
    job_id = desk.submit()
    path = desk.client.rundir(job_id).path / "spec.json"
    path.write_bytes(path.read_bytes().replace(b'"samples": 4', b'"samples": 6'))
    [found] = desk.rows("show", job_id)
    assert found["problem"] == f"{path}: damaged, or changed by hand: then remove its digest"
    assert "damaged" in desk.warmd("show", job_id).out
