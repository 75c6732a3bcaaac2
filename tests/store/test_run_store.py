"""The run store: uploads, fences and fetches of run directories, on a real S3 server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from s3_servers import S3Server, s3_server

from warmd.daemon.host.home import Home
from warmd.daemon.runs import events
from warmd.daemon.runs.checkpoints import Checkpoints
from warmd.daemon.runs.events import EventLog
from warmd.daemon.runs.fence import Superseded
from warmd.daemon.runs.rundir import RunDir
from warmd.daemon.store import fetching, index
from warmd.daemon.store.pending import PendingUploads
from warmd.daemon.store.remote import RemoteRuns
from warmd.daemon.store.upload import RunUpload


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as made:
        yield made


class Machine:
    """A home of its own, with what its daemon does for run directories."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.home = Home(folder)
        self.home.create()
        self.remote = RemoteRuns(self.home, url)
        self.bucket = self.remote.bucket
        self.pending = PendingUploads(self.home)

    def rundir(self, job_id: str) -> RunDir:
        return RunDir(self.home.runs / job_id)

    def submit(self) -> str:
        rundir = RunDir.create(self.home.runs, "grpo", {"spec": {}})
        self.remote.publish(rundir.path.name)
        return rundir.path.name

    def begin(self, job_id: str, execution: int) -> Path | None:
        """Begin an execution; return the checkpoint that it resumes from."""
        now = fetching.open_rundir(self.home, self.bucket, job_id, execution)
        fetching.fetch_checkpoint(self.bucket, self.rundir(job_id), now)
        return Checkpoints(self.rundir(job_id).checkpoints).latest()

    def upload(self, job_id: str) -> RunUpload:
        found = self.pending.read(job_id)
        assert found is not None
        return RunUpload(self.bucket, self.rundir(job_id), found)

    def step(self, job_id: str, execution: int, *steps: int) -> None:
        with EventLog(self.rundir(job_id).events, execution=execution) as log:
            for step in steps:
                log.emit("step", step=step)

    def checkpoint(self, job_id: str, step: int, content: bytes = b"weights") -> None:
        with Checkpoints(self.rundir(job_id).checkpoints, keep=2).commit(step) as staging:
            (staging.path / "weights").write_bytes(content)
            (staging.path / "state").write_bytes(b"%d" % step)

    def end(self, job_id: str) -> None:
        """The end of an execution, with all of its uploads."""
        upload = self.upload(job_id)
        upload.advance(is_last=True)
        upload.remove_unused()
        self.pending.remove(job_id)

    def steps(self, job_id: str) -> list[int]:
        return [event["step"] for event in events.read(self.rundir(job_id).events)]


@pytest.fixture
def machines(server: S3Server, tmp_path: Path) -> tuple[Machine, Machine]:
    url = server.url(tmp_path.name)
    return Machine(tmp_path / "a", url), Machine(tmp_path / "b", url)


def test_another_machine_resumes_from_the_latest_checkpoint_with_all_events_before_it(machines):
    one, other = machines
    job_id = one.submit()
    assert one.begin(job_id, 1) is None
    one.step(job_id, 1, 1, 2)
    one.checkpoint(job_id, 2)
    one.step(job_id, 1, 3, 4)
    one.checkpoint(job_id, 4, b"later")
    one.upload(job_id).advance(is_last=False)
    one.step(job_id, 1, 5)  # lost with the machine
    resumed = other.begin(job_id, 2)
    assert resumed is not None
    assert (resumed.name, (resumed / "weights").read_bytes()) == ("checkpoint-4", b"later")
    assert other.steps(job_id) == [1, 2, 3, 4]
    earlier = other.rundir(job_id).checkpoints / "checkpoint-2"
    assert [path.name for path in earlier.iterdir()] == ["manifest.json"]  # counted, not fetched


def test_a_late_writer_commits_nothing_and_its_events_are_no_part_of_the_log(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    one.step(job_id, 1, 1, 2)
    one.checkpoint(job_id, 2)
    late = one.upload(job_id)
    late.advance(is_last=False)
    other.begin(job_id, 2)
    one.step(job_id, 1, 3, 4)
    one.checkpoint(job_id, 4, b"of the late writer")
    with pytest.raises(Superseded, match=r"execution 1 of .* superseded by execution 2"):
        late.advance(is_last=False)
    with pytest.raises(Superseded):
        fetching.open_rundir(one.home, one.bucket, job_id, 1)
    other.step(job_id, 2, 3)
    other.end(job_id)
    third = Machine(one.home.path.parent / "c", one.url)
    assert third.begin(job_id, 3) is not None
    assert list(index.read(third.bucket, job_id).checkpoints()) == [2]
    assert third.steps(job_id) == [1, 2, 3]
