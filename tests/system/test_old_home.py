"""The home of an earlier version is taken over: all jobs are listed, and unfinished ones resume."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from old_homes import OldHome, unpacked

pytestmark = [
    pytest.mark.nightly(part="homes", catches="a format of 0.1.0 that is no longer read"),
    pytest.mark.timeout(300),
]

ARCHIVE = Path(__file__).parents[1] / "homes" / "0.1.0.tar.xz"
ENDED = {
    "finished": "finished",
    "failed": "failed",
    "mlm": "finished",
    "encode": "finished",
    "answer": "finished",
    "http": "finished",
    "stopped": "stopped",
    "canceled": "canceled",
}


@pytest.fixture(scope="module")
def old() -> Iterator[OldHome]:
    with unpacked(ARCHIVE) as folder:
        with open(folder / "home" / "config.yaml", "a") as file:
            file.write("server_binary: auto\n")  # the former name of redis_binary
        daemon = OldHome(folder)
        with contextlib.closing(daemon):
            daemon.start()
            yield daemon


def test_every_job_is_listed(old):
    assert {job["id"] for job in old.client.jobs.all()} == set(old.jobs.values())
    assert {path.name for path in old.home.runs.iterdir()} == set(old.jobs.values())


def test_ended_jobs_of_an_old_home_are_shown_unchanged(old):
    assert {name: old.status_of(name) for name in ENDED} == ENDED
    for name in ENDED:
        assert old.logged(name) == old.before[name]
    assert old.client.jobs.result(old.jobs["finished"])["steps"] == 6
    assert old.client.jobs.result(old.jobs["mlm"])["eval"]["n"] == 8
    assert "the reward is broken" in old.job("failed")["error"]


def test_answers_of_an_old_home_are_kept(old):
    for name in ("answer", "http"):
        (choice,) = old.client.jobs.result(old.jobs[name])["choices"]
        assert len(choice["text"]) == 6
    assert old.client.jobs.result(old.jobs["encode"])["width"] == 8


def test_interrupted_trainings_resume_from_their_checkpoints(old):
    old.finish("interrupted")
    assert old.resumed_from("interrupted") == 4
    said = [e["message"] for e in old.logged("interrupted") if e["type"] == "warning"]
    (changed,) = [text for text in said if text.startswith("from step 5 on, results differ from")]
    assert "every completion of one token is learned" in changed
    assert "with its leading space" in changed
    before = [event["step"] for event in old.before["interrupted_mlm"] if event["type"] == "step"]
    old.finish("interrupted_mlm")
    assert 20 <= old.resumed_from("interrupted_mlm") <= before[-1]


def test_waiting_jobs_run_once_and_a_later_one_still_waits(old):
    for name in ("queued", "scheduled", "deferred"):
        old.finish(name)
        assert old.job(name)["execution"] == 1
    assert old.status_of("late") == "scheduled"


def test_a_file_of_prompts_is_answered(old):
    old.finish("unanswered")
    lines = (old.folder / "project" / "answers.jsonl").read_bytes().splitlines()
    assert [orjson.loads(line)["row"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["held", "released"])
def test_paused_jobs_wait_for_unpause(old, name):
    old.finish("interrupted")  # the daemon has had time to take everything up
    assert old.logged(name) == old.before[name]
    assert old.job(name)["paused"]
    old.client.jobs.unpause(old.jobs[name])
    old.finish(name)


def test_a_stopped_job_is_resumed(old):
    old.client.jobs.resume(old.jobs["stopped"])
    old.finish("stopped")
    assert old.resumed_from("stopped") == 5
