"""The home of an earlier version is taken over: all jobs are listed, and unfinished ones resume."""

from __future__ import annotations

import contextlib
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import xxhash
from daemons import Daemon

from warmd.configs import config
from warmd.daemon.client.client import Client
from warmd.daemon.host.home import Home
from warmd.daemon.runs import events

pytestmark = [
    pytest.mark.nightly(part="homes", catches="a format of 0.1.0 that is no longer read"),
    pytest.mark.timeout(300),
]

ARCHIVE = Path(__file__).parents[1] / "homes" / "0.1.0.tar.xz"
ORIGINAL = b"/tmp/warmd-old-original"  # where it was made
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


class OldHome(Daemon):
    """The daemon of this version in that home."""

    def __init__(self, folder: Path) -> None:
        self.config = config.load(home=folder / "home", environ={})
        self.home = Home(self.config.home)
        self.client = Client(self.config)
        self.folder = folder
        self.jobs: dict[str, str] = orjson.loads((folder / "project" / "jobs.json").read_bytes())
        self.before = {name: self.logged(name) for name in self.jobs}

    def logged(self, name: str) -> list[dict[str, Any]]:
        """The events of a job, without Redis."""
        return list(events.read(self.home.runs / self.jobs[name] / "events.jsonl"))

    def job(self, name: str) -> dict[str, Any]:
        return self.client.job(self.jobs[name])

    def status_of(self, name: str) -> str:
        return str(self.job(name)["status"])

    def finish(self, name: str) -> None:
        """Wait until a job has finished; check that nothing of it was lost or done twice."""
        job = self.wait(self.jobs[name], timeout_s=120)
        assert job["status"] == "finished", job["error"]
        logged, before = self.logged(name), self.before[name]
        assert logged[: len(before)] == before
        assert [event["seq"] for event in logged] == list(range(1, len(logged) + 1))
        assert [event["type"] for event in logged].count("finished") == 1
        steps = [event["step"] for event in logged if event["type"] == "step"]
        assert steps == list(range(1, (job["steps_total"] or 0) + 1))

    def resumed_from(self, name: str) -> int | None:
        """The checkpoint from which the last execution of a job resumed."""
        found: int | None = [e for e in self.logged(name) if e["type"] == "begin"][-1][
            "resumed_from"
        ]
        return found


def relocate(folder: Path) -> None:
    """Replace the path where the home was made; Redis' file needs one of the same length."""
    here = str(folder).encode()
    assert len(here) == len(ORIGINAL)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        if ORIGINAL in content:
            path.write_bytes(content.replace(ORIGINAL, here))
    for path in folder.rglob("manifest.json"):  # it has a checksum of itself
        manifest = orjson.loads(path.read_bytes())["manifest"]
        checksum = xxhash.xxh3_128_hexdigest(orjson.dumps(manifest))
        path.write_bytes(orjson.dumps({"manifest": manifest, "xxh3_128": checksum}))


@pytest.fixture(scope="module")
def old() -> Iterator[OldHome]:
    with tempfile.TemporaryDirectory(prefix="warmd-old-", dir="/tmp") as folder:
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder, filter="data")
        relocate(Path(folder))
        with open(Path(folder) / "home" / "config.yaml", "a") as file:
            file.write("server_binary: auto\n")  # the former name of redis_binary
        daemon = OldHome(Path(folder))
        with contextlib.closing(daemon):
            daemon.start()
            yield daemon


def test_every_job_is_listed(old):
    assert {job["id"] for job in old.client.jobs()} == set(old.jobs.values())
    assert {path.name for path in old.home.runs.iterdir()} == set(old.jobs.values())


def test_ended_jobs_of_an_old_home_are_shown_unchanged(old):
    assert {name: old.status_of(name) for name in ENDED} == ENDED
    for name in ENDED:
        assert old.logged(name) == old.before[name]
    assert old.client.result(old.jobs["finished"])["steps"] == 6
    assert old.client.result(old.jobs["mlm"])["eval"]["n"] == 8
    assert "the reward is broken" in old.job("failed")["error"]


def test_answers_of_an_old_home_are_kept(old):
    for name in ("answer", "http"):
        (choice,) = old.client.result(old.jobs[name])["choices"]
        assert len(choice["text"]) == 6
    assert old.client.result(old.jobs["encode"])["width"] == 8


def test_interrupted_trainings_resume_from_their_checkpoints(old):
    old.finish("interrupted")
    assert old.resumed_from("interrupted") == 4
    said = [e["message"] for e in old.logged("interrupted") if e["type"] == "warning"]
    (changed,) = [text for text in said if text.startswith("from step 5 on, this version of warmd")]
    assert "completions of one token" in changed
    assert "as they continue their prompts" in changed
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
    old.client.unpause(old.jobs[name])
    old.finish(name)


def test_a_stopped_job_is_resumed(old):
    old.client.resume(old.jobs["stopped"])
    old.finish("stopped")
    assert old.resumed_from("stopped") == 5
