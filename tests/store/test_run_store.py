"""The run store: uploads, fences and fetches of run directories, on a real S3 server."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from s3_servers import S3Server, s3_server
from shell import warmd
from waiting import wait_until

from warmd.cli.commands.doctor import check_runs
from warmd.cli.main import main
from warmd.configs.config import DaemonConfig
from warmd.daemon.client.client import Client
from warmd.daemon.groups import stages
from warmd.daemon.groups.curriculum import Attempt, Curriculum, Stage, State
from warmd.daemon.host.home import Home
from warmd.daemon.lifecycle.places import Places
from warmd.daemon.queue import keys
from warmd.daemon.queue.jobs import JobStore
from warmd.daemon.runs import events
from warmd.daemon.runs.checkpoints import Checkpoints, verify
from warmd.daemon.runs.events import EventLog
from warmd.daemon.runs.fence import Superseded
from warmd.daemon.runs.rundir import RunDir
from warmd.daemon.store import copies, event_segments, fetching, index
from warmd.daemon.store.__main__ import Uploader
from warmd.daemon.store.bucket import Bucket, StoreUnavailable
from warmd.daemon.store.pending import Pending, PendingUploads
from warmd.daemon.store.remote import RemoteRuns
from warmd.daemon.store.upload import RunUpload
from warmd.daemon.work.run_fetches import RunFetch
from warmd.daemon.work.stored_runs import StoredRuns
from warmd.jobs.errors import Conflict


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as made:
        yield made


class Machine:
    """A home of its own, with the daemon's operations on run directories."""

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
        for name in (n for n in now.files if not n.startswith("checkpoints/")):
            assert (self.rundir(job_id).path / name).is_file() or now.files[name].bytes > 10**7
        fetching.fetch_large(
            self.bucket,
            self.rundir(job_id),
            now,
            on_begin=lambda name, total: None,
            on_bytes=lambda number: None,
        )
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


def test_files_that_cannot_be_stored_block_no_upload(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    folder = one.rundir(job_id).path
    (folder / "model").mkdir()
    (folder / "model" / "ä #?%&+\n").write_text("kept")
    (folder / "model" / os.fsdecode(b"latin-1 \xff")).write_text("not in UTF-8")
    os.mkfifo(folder / "pipe")  # whoever opened it would wait for ever
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "nowhere").symlink_to(folder / "nothing")
    (folder / "loop").symlink_to(folder / "loop")
    one.end(job_id)
    other.begin(job_id, 2)
    model = other.rundir(job_id).path / "model"
    assert [(path.name, path.read_text()) for path in model.iterdir()] == [("ä #?%&+\n", "kept")]
    there = {path.name for path in other.rundir(job_id).path.iterdir()}
    assert not there & {"pipe", "zero", "nowhere", "loop"}


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


def test_a_late_writer_commits_nothing_and_its_events_are_not_in_the_log(machines):
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


def test_the_model_of_a_job_is_fetched_once_and_again_when_it_has_changed(machines):
    one, other = machines
    job_id = one.submit()
    model = one.rundir(job_id).path / "model"
    for execution, content in ((1, b"first"), (2, b"second")):
        one.begin(job_id, execution)
        model.mkdir(exist_ok=True)
        (model / "weights").write_bytes(content)
        (model / "config.json").write_bytes(b"{}")
        one.end(job_id)
        begun: list[tuple[str, int]] = []
        fetched: list[int] = []
        for _ in range(2):
            other.remote.fetch_model(
                job_id,
                on_begin=lambda *what, begun=begun: begun.append(what),
                on_bytes=fetched.append,
            )
            copy = other.rundir(job_id)
            assert (copy.path / "model" / "weights").read_bytes() == content
        assert begun == [("model", len(content) + 2)]
        assert sum(fetched) == len(content) + 2
    assert copy.read_spec()["id"] == job_id

    class Killed(Exception):
        pass

    def kill(number: int) -> None:
        raise Killed

    third = Machine(one.home.path.parent / "c", one.url)
    with pytest.raises(Killed):
        third.remote.fetch_model(job_id, on_bytes=kill)
    assert not (third.rundir(job_id).path / "model").exists()  # whole or not at all
    third.remote.fetch_model(job_id)
    assert (third.rundir(job_id).path / "model" / "weights").read_bytes() == b"second"
    # The machine that trained it downloads nothing.
    one.remote.fetch_model(job_id, on_bytes=kill)


def test_doctor_reports_whether_the_bucket_can_be_used(machines, server: S3Server):
    one, _ = machines
    here = check_runs(DaemonConfig(home=one.home.path, runs=one.url))
    assert (here.result, here.found) == ("ok", one.bucket.name)
    assert [key for key in one.bucket.sizes("") if "doctor" in key] == []
    nowhere = one.url.replace("s3://runs/", "s3://no-such-bucket/")
    missing = check_runs(DaemonConfig(home=one.home.path, runs=nowhere))
    assert missing.result == "fail"
    assert "no-such-bucket" in missing.found


def test_a_kill_at_any_step_of_an_upload_leaves_whole_checkpoints_only(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    one.step(job_id, 1, 1, 2)
    one.checkpoint(job_id, 2)
    one.upload(job_id).advance(is_last=False)
    one.step(job_id, 1, 3, 4)
    one.checkpoint(job_id, 4, b"later")
    writes = 0
    while True:  # one write more each time, until an upload ends
        upload = one.upload(job_id)  # what the next process does
        try:
            with dying_after(upload, writes):
                upload.advance(is_last=False)
        except Killed:
            found = index.read(other.bucket, job_id)
            assert list(found.checkpoints()) in ([2], [2, 4])
            is_whole(other, job_id)
            writes += 1
        else:
            break
    assert writes >= 4  # the events, two files and the manifest before the index
    assert list(index.read(other.bucket, job_id).checkpoints()) == [2, 4]
    one.end(job_id)
    used = {file.key for file in index.read(other.bucket, job_id).files.values()}
    assert set(other.bucket.sizes(f"{job_id}/data")) == used  # nothing is left of killed uploads


class Killed(Exception):
    """The process has died here."""


@contextmanager
def dying_after(upload: RunUpload, number: int) -> Iterator[None]:
    """Let an upload die before a write: as many are done before."""
    bucket, left = upload._bucket, number
    originals = {name: getattr(bucket, name) for name in ("put", "put_blocks", "put_if")}

    def dying(write: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **options: Any) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            write(*args, **options)

        return call

    for name, write in originals.items():
        setattr(bucket, name, dying(write))
    try:
        yield
    finally:
        for name in originals:
            delattr(bucket, name)


def is_whole(machine: Machine, job_id: str) -> None:
    """Fetch all checkpoints of a job as another machine would; they are verified."""
    machine.remote.refresh(job_id)
    for step in index.read(machine.bucket, job_id).checkpoints():
        machine.remote.fetch_checkpoint(job_id, step)
        verify(machine.rundir(job_id).checkpoints / f"checkpoint-{step}")


def test_a_machine_that_is_ahead_of_the_store_resumes_from_its_own_disk(machines):
    one, _ = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    one.step(job_id, 1, 1, 2)
    one.checkpoint(job_id, 2)  # killed before any upload
    resumed = one.begin(job_id, 2)
    assert resumed is not None
    assert resumed.name == "checkpoint-2"
    one.step(job_id, 2, 3)
    one.end(job_id)
    assert list(index.read(one.bucket, job_id).checkpoints()) == [2]
    third = Machine(one.home.path.parent / "c", one.url)
    third.remote.refresh(job_id)
    assert third.steps(job_id) == [1, 2, 3]


def test_a_note_of_an_upload_that_cannot_be_read_is_no_sign_that_it_is_complete(machines):
    one, _ = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    note = one.pending.folder / job_id
    content = note.read_bytes()
    runs = StoredRuns(one.home, one.bucket)
    assert one.pending.read(job_id) == Pending(1, 0)
    note.write_bytes(content.replace(b"{", b'{"new": 1, '))  # by a later version
    assert one.pending.read(job_id) == Pending(1, 0)
    for damaged in (b"", b"[]", b'{"execution": "x"}', content[:9]):
        note.write_bytes(damaged)
        assert one.pending.read(job_id) is None
        assert not runs._is_uploaded(job_id, 1)
    uploader = Uploader(one.home, one.bucket)
    wait_until(lambda: iterated(uploader, lambda: one.pending.problem(job_id)))
    assert f"{note} cannot be read" in str(one.pending.problem(job_id))
    one.pending.remove(job_id)
    assert runs._is_uploaded(job_id, 1)


def test_initial_weights_are_fetched_again_after_an_interruption(machines):
    one, other = machines
    rundir = RunDir.create(one.home.runs, "grpo", {"spec": {}})
    job_id = rundir.path.name
    weights = {"config.json": 2, "model.safetensors": 16 << 20}
    (rundir.path / "init").mkdir()
    for name, size in weights.items():
        (rundir.path / "init" / name).write_bytes(b"w" * size)
    one.remote.publish(job_id)
    fetching.open_rundir(other.home, other.bucket, job_id, 1)  # then it is killed
    for execution in (1, 2):  # the network was cut; the worker was killed
        other.begin(job_id, execution)
        init = other.rundir(job_id).path / "init"
        assert {path.name: path.stat().st_size for path in init.iterdir()} == weights
        (init / "model.safetensors").unlink()


def test_pruned_checkpoints_are_removed_from_the_store_also_by_the_next_machine(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    for step in (2, 4):
        one.checkpoint(job_id, step)
    one.upload(job_id).advance(is_last=False)
    other.begin(job_id, 2)
    other.checkpoint(job_id, 6)  # keeps two: the folder of step 2, which was not fetched, goes
    upload = other.upload(job_id)
    upload.advance(is_last=False)
    upload.advance(is_last=False)
    assert list(index.read(other.bucket, job_id).checkpoints()) == [4, 6]


def test_a_machine_removes_files_of_its_superseded_execution(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    one.checkpoint(job_id, 2)
    one.upload(job_id).advance(is_last=False)
    one.checkpoint(job_id, 4, b"never uploaded")
    other.begin(job_id, 2)
    other.step(job_id, 2, 3)
    other.end(job_id)
    resumed = one.begin(job_id, 3)
    assert resumed is not None
    assert resumed.name == "checkpoint-2"
    assert one.steps(job_id) == [3]


def test_equal_files_are_stored_once_and_growing_ones_as_they_are_at_the_end(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    one.checkpoint(job_id, 2, b"x" * 100_000)
    path = one.rundir(job_id).path
    (path / "model").mkdir()
    os.link(path / "checkpoints/checkpoint-2/weights", path / "model" / "weights")
    (path / "rows.jsonl").write_text("1\n")
    one.upload(job_id).advance(is_last=False)
    (path / "rows.jsonl").write_text("1\n2\n")
    one.end(job_id)
    found = index.read(other.bucket, job_id)
    assert found.files["model/weights"] == found.files["checkpoints/checkpoint-2/weights"]
    other.remote.refresh(job_id)
    assert (other.rundir(job_id).path / "rows.jsonl").read_text() == "1\n2\n"


@pytest.mark.slow
def test_large_files_are_uploaded_in_parts_and_verified_when_they_are_fetched(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    one.checkpoint(job_id, 2, content := os.urandom(20_000_000))
    (one.rundir(job_id).path / "vectors.bin").write_bytes(content[::-1])
    one.end(job_id)
    resumed = other.begin(job_id, 2)
    assert resumed is not None
    assert (resumed / "weights").read_bytes() == content
    assert (other.rundir(job_id).path / "vectors.bin").read_bytes() == content[::-1]


def test_a_checkpoint_that_is_damaged_in_the_store_is_skipped_for_the_one_before(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    for step in (2, 4):
        one.checkpoint(job_id, step, b"of step %d" % step)
    one.end(job_id)
    name = "checkpoints/checkpoint-4/weights"
    key = index.read(one.bucket, job_id).files[name].key
    one.bucket.put(key, b"of step 5")
    resumed = other.begin(job_id, 2)
    assert resumed is not None
    assert resumed.name == "checkpoint-2"


def test_simultaneous_changes_of_an_index_are_both_kept(machines):
    one, other = machines
    job_id = one.submit()

    def add(machine: Machine, name: str) -> None:
        for number in range(10):
            file = index.StoredFile(f"{name}{number}", 1, "")
            index.commit(
                machine.bucket,
                job_id,
                lambda old: replace(old, files={**old.files, file.key: file}),  # noqa: B023
            )

    threads = [Thread(target=add, args=pair) for pair in ((one, "a"), (other, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(index.read(one.bucket, job_id).files) == 1 + 20


def test_a_removed_job_leaves_nothing_and_a_late_writer_does_not_bring_it_back(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    one.checkpoint(job_id, 2)
    upload = one.upload(job_id)
    other.remote.withdraw(job_id)
    with pytest.raises(Superseded, match="was removed"):
        upload.advance(is_last=True)
    assert not index_exists(one, job_id)


def index_exists(machine: Machine, job_id: str) -> bool:
    return machine.bucket.get(f"{job_id}/{index.NAME}") is not None


def test_a_store_that_cannot_be_used_is_one_line_without_keys(server, tmp_path):
    gone = Bucket("s3://runs/x?endpoint=http://127.0.0.1:9&region=us-east-1")
    with pytest.raises(StoreUnavailable) as caught:
        gone.get("key")
    text = str(caught.value)
    assert text.startswith("run store s3://runs/x: ")
    assert "\n" not in text
    missing = Bucket(server.url().replace("s3://runs/", "s3://not-there/"))
    with pytest.raises(StoreUnavailable, match=r"404 .*NoSuchBucket"):
        missing.put("key", b"")


def test_wrong_keys_are_one_line_that_says_which_to_check(server, tmp_path, desk, monkeypatch):
    url = server.url(tmp_path.name)
    with server.refusing_keys():
        for home in (desk.home.path, tmp_path / "other"):
            monkeypatch.setenv("WARMD_RUNS", url)
            command = desk.grpo if home == desk.home.path else ("start",)
            done = warmd(*command, home=home)
            assert done.is_refusal(3)
            assert "403 Forbidden (InvalidAccessKeyId)" in done.err
            assert done.err.endswith("check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY\n")
        assert os.listdir(desk.home.runs) == []
        found = check_runs(DaemonConfig(home=desk.home.path, runs=url))
    assert found.result == "fail"
    assert found.found == done.err.removeprefix("Error: ").rstrip("\n")


@pytest.mark.nightly(
    part="networks", catches="a bucket that does not answer and blocks for minutes"
)
def test_an_unresponsive_store_does_not_block_for_minutes(server, tmp_path):
    bucket = Bucket(server.url(tmp_path.name), is_for_person=True)
    server.proxy.hang()
    begun = time.monotonic()
    try:
        with pytest.raises(
            StoreUnavailable, match=r"^run store s3://\S+: .*error sending request$"
        ):
            bucket.get("any")
    finally:
        server.proxy.resume()
    assert time.monotonic() - begun < 60


def test_only_copies_of_jobs_that_others_removed_are_deleted(machines):
    one, other = machines
    one.bucket.put(copies.ID, b"the id of this store")
    removed, kept, running = (one.submit() for _ in range(3))
    other.begin(removed, 1)
    other.end(removed)
    other.begin(running, 1)
    other.remote.refresh(kept)
    foreign = RunDir.create(other.home.runs, "grpo", {"spec": {}}).path.name  # never in the store
    for job_id in (removed, running):
        one.remote.withdraw(job_id)
    for job_id in (removed, kept, running, foreign):
        os.utime(other.home.runs / job_id, (0, 0))
    assert copies.remove_outdated(other.bucket, other.home.runs, other.pending) == [removed]
    left = {path.name for path in other.home.runs.iterdir()}
    assert left == {kept, running, foreign}
    one.bucket.delete([copies.ID])
    one.remote.withdraw(kept)  # as if the bucket had been emptied, and its id lost
    os.utime(other.home.runs / kept, (0, 0))
    assert copies.remove_outdated(other.bucket, other.home.runs, other.pending) == []


def snapshot(machine: Machine) -> dict[str, bytes]:
    """The content of the whole store."""
    found = {}
    for key in machine.bucket.sizes(""):
        content = machine.bucket.get(key)
        assert content is not None
        found[key] = content.data
    return found


def restore(machine: Machine, content: dict[str, bytes]) -> None:
    machine.bucket.delete([key for key in machine.bucket.sizes("") if key not in content])
    for key, data in content.items():
        machine.bucket.put(key, data)


def files_of(machine: Machine, job_id: str) -> dict[str, bytes]:
    """The files that an execution has written, and what people have noted."""
    folder = machine.rundir(job_id).path
    names = (p.relative_to(folder) for p in folder.rglob("*") if p.is_file())
    return {
        str(name): (folder / name).read_bytes()
        for name in names
        if not name.parts[0].startswith(".") and name.name not in ("lock", "execution")
    }


def test_a_store_restored_from_an_older_snapshot_takes_nothing_newer_from_a_machine(machines):
    one, other = machines
    one.bucket.put(copies.ID, b"the id of this store")
    job_id = one.submit()
    one.begin(job_id, 1)
    one.step(job_id, 1, 1, 2)
    one.checkpoint(job_id, 2)
    one.upload(job_id).advance(is_last=False)
    older = snapshot(one)
    one.step(job_id, 1, 3, 4)
    one.checkpoint(job_id, 4)
    revision = one.rundir(job_id).read_spec()["revision"]
    one.rundir(job_id).write_result({"steps": 4, "metrics": {}}, revision=revision)
    one.end(job_id)
    later = ended(one)  # not in the snapshot at all
    other.remote.refresh(job_id)
    kept = {machine: files_of(machine, job_id) for machine in machines}
    of_later = files_of(one, later)
    restore(one, older)
    for machine in machines:
        for request in (
            lambda: machine.remote.refresh(job_id),  # noqa: B023
            lambda: machine.remote.fetch_model(job_id),  # noqa: B023
            lambda: machine.remote.publish(job_id),  # noqa: B023
        ):
            with pytest.raises(Conflict, match=f"earlier state of {job_id} than this machine"):
                request()
        machine.remote.refresh_summaries([job_id])
        assert files_of(machine, job_id) == kept[machine]
        for path in machine.home.runs.iterdir():
            os.utime(path, (0, 0))
        assert copies.remove_outdated(machine.bucket, machine.home.runs, machine.pending) == []
    assert files_of(one, later) == of_later
    # The next execution continues from what this machine has, and makes the store complete again.
    resumed = one.begin(job_id, 2)
    assert resumed is not None
    assert resumed.name == "checkpoint-4"
    one.step(job_id, 2, 5)
    one.end(job_id)
    other.remote.refresh(job_id)
    assert other.steps(job_id) == [1, 2, 3, 4, 5]
    assert list(index.read(one.bucket, job_id).checkpoints()) == [2, 4]


def ended(machine: Machine) -> str:
    """A job that has ended on this machine, with everything in the store."""
    job_id = machine.submit()
    machine.begin(job_id, 1)
    machine.step(job_id, 1, 1, 2)
    machine.checkpoint(job_id, 2)
    revision = machine.rundir(job_id).read_spec()["revision"]
    machine.rundir(job_id).write_result({"steps": 2, "metrics": {}}, revision=revision)
    machine.end(job_id)
    return job_id


def test_local_files_are_shown_while_the_store_is_unreachable(
    machines, server: S3Server, capsys, monkeypatch
):
    one, other = machines
    job_id, elsewhere = ended(one), ended(one)
    other.remote.refresh(job_id)
    outdated: list[str] = []
    config = DaemonConfig(home=other.home.path, runs=other.url)
    client = Client(config, on_offline=lambda: None, on_outdated=outdated.append)
    server.proxy.cut()
    try:
        assert client.find(job_id) == job_id
        assert client.jobs.result(job_id) == {"steps": 2, "metrics": {}}
        assert client.jobs.get(job_id)["step"] == 2
        [said] = outdated  # once, and no further request: each could take long
        assert said.startswith(f"run store {other.bucket.name}: ")
        with pytest.raises(StoreUnavailable):
            client.rundir(elsewhere)
        with pytest.raises(StoreUnavailable):
            client.places.current(job_id)  # what changes a job does not decide on old files
        with pytest.raises(StoreUnavailable):
            client.models.fetch_weights(job_id, 2)  # only its manifest is here
        monkeypatch.setenv("WARMD_RUNS", other.url)
        for command in ("show", "result", "diff"):
            jobs = [job_id, job_id] if command == "diff" else [job_id]
            assert main([command, *jobs, "--home", str(other.home.path)]) == 0, command
            assert f"run store {other.bucket.name}: " in capsys.readouterr().err
    finally:
        server.proxy.restore()
    client = Client(config)
    client.models.fetch_weights(job_id, 2)
    verify(other.rundir(job_id).checkpoints / "checkpoint-2")


def iterated(uploader: Uploader, is_reached: Callable[[], object]) -> bool:
    """Whether something is so after another iteration of the uploader."""
    uploader.iterate()
    return bool(is_reached())


def test_a_job_that_cannot_be_read_delays_no_upload_of_another(machines):
    one, _ = machines
    broken, whole = one.submit(), one.submit()
    for job_id in (broken, whole):
        one.begin(job_id, 1)
    one.rundir(broken).events.unlink()
    one.rundir(broken).events.mkdir()  # reading it fails, as from a broken disk
    uploader = Uploader(one.home, one.bucket)

    wait_until(lambda: iterated(uploader, lambda: one.pending.problem(broken)))
    one.checkpoint(whole, 2)
    tries = uploader._retries[broken].failures
    wait_until(lambda: iterated(uploader, lambda: index.read(one.bucket, whole).checkpoints()))
    assert uploader._retries[broken].failures == tries  # it still waits for its next try
    assert "Is a directory" in str(one.pending.problem(broken))
    assert one.pending.problem(whole) is None
    one.rundir(broken).events.rmdir()
    one.checkpoint(broken, 2)
    wait_until(lambda: iterated(uploader, lambda: index.read(one.bucket, broken).checkpoints()))
    wait_until(lambda: iterated(uploader, lambda: one.pending.problem(broken) is None))


def test_an_evaluation_gets_the_rows_that_it_is_compared_with(machines):
    one, other = machines
    named = one.submit()
    one.begin(named, 1)
    rows = one.rundir(named).path / "rows.jsonl"
    rows.write_text("1\n")
    one.upload(named).advance(is_last=False)  # it still runs
    document = {"spec": {"against": named}}
    rundir = RunDir.create(one.home.runs, "eval", document)
    one.remote.publish(rundir.path.name)
    fetch = RunFetch(other.home, other.bucket, rundir.path.name, 1)
    rows.write_bytes(b"x" * (16 << 20))
    one.rundir(named).write_result({"metrics": {}}, revision=1)
    assert not fetch.is_done  # it waits for all rows: fewer could be compared without an error
    one.end(named)
    wait_until(lambda: fetch.is_done)
    assert fetch.failure is None
    assert other.rundir(named).read_result() == {"metrics": {}}
    assert (other.rundir(named).path / "rows.jsonl").stat().st_size == 16 << 20


def test_a_damaged_spec_fails_the_job_instead_of_beginning_anew(machines):
    one, other = machines
    rundir = RunDir.create(one.home.runs, "eval", {"spec": {"against": 5}})
    one.remote.publish(rundir.path.name)
    fetch = RunFetch(other.home, other.bucket, rundir.path.name, 1)
    wait_until(lambda: fetch.is_done)
    assert fetch.failure is not None
    assert fetch.failure.startswith("run directory: TypeError")


def test_a_stage_is_rolled_back_whose_result_alone_a_list_of_jobs_has_fetched(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    with EventLog(one.rundir(job_id).events, execution=1) as log:
        log.emit("begin", learning_rate=0.5)
    one.rundir(job_id).write_result({}, revision=1)
    one.end(job_id)
    other.remote.refresh_summaries([job_id])
    assert other.rundir(job_id).read_result() == {}
    assert not other.rundir(job_id).events.exists()
    store = JobStore(keys.connect_once("redis://127.0.0.1:1/0"))
    places = Places(other.home, store, other.remote)
    plan = Curriculum(
        id="curriculum-1", kind="grpo", created=0.0, name=None, tags=[], gate=None, questions=1,
        most_questions=1, queueing={}, stages=[Stage("one", {"spec": {"samples": 4}}, True)],
    )  # fmt: skip
    again = Attempt(stage=0, number=1, job="grpo-2")
    state = State("running", [Attempt(stage=0, number=0, job=job_id), again])
    document = stages._training(places, plan, state, again)
    assert document["spec"] == {"samples": 4, "learning_rate": 0.25}


def test_a_flipped_bit_in_stored_events_is_reported_by_the_node_that_takes_the_job_over(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    one.step(job_id, 1, 1, 2)
    one.checkpoint(job_id, 2)
    one.upload(job_id).advance(is_last=False)
    [segment] = event_segments.segments(one.bucket, job_id)
    stored = one.bucket.get(segment.key)
    assert stored is not None
    flipped = stored.data.replace(b'"step":1', b'"step":9')
    assert flipped != stored.data

    def problems(number: int) -> list[str]:
        found: list[str] = []
        fetching.open_rundir(other.home, other.bucket, job_id, number, on_problem=found.append)
        other.pending.remove(job_id)
        return found

    assert problems(2) == []
    one.bucket.put(segment.key, flipped, checksum=stored.checksum)
    [problem] = problems(3)
    assert segment.key in problem
    assert "does not match its checksum" in problem
    assert other.steps(job_id) == [9, 2]
    one.bucket.put(segment.key, stored.data)  # as an earlier warmd has stored it
    assert problems(4) == []


def test_an_upload_that_a_removal_overtakes_leaves_nothing_in_the_store(machines):
    one, other = machines
    job_id = one.submit()
    one.begin(job_id, 1)
    one.step(job_id, 1, 1, 2)
    uploader = Uploader(one.home, one.bucket)

    wait_until(lambda: iterated(uploader, lambda: event_segments.segments(one.bucket, job_id)))
    other.remote.withdraw(job_id)
    one.step(job_id, 1, 3)
    one.checkpoint(job_id, 2, b"after the removal")
    wait_until(lambda: iterated(uploader, lambda: one.pending.is_uploaded(job_id)))
    assert list(one.bucket.sizes(job_id)) == []
    assert other.remote.ids() == []


def test_one_of_two_simultaneous_changes_of_a_job_is_refused(machines):
    one, other = machines
    job_id = one.submit()
    for machine in (one, other):
        machine.remote.refresh(job_id)
        machine.rundir(job_id).revise(spec={"by": machine.home.path.name})
    one.remote.publish(job_id)
    one.remote.publish(job_id)
    with pytest.raises(Conflict, match="was changed on another machine: try again"):
        other.remote.publish(job_id)
    other.remote.refresh(job_id)
    assert other.rundir(job_id).read_spec()["spec"]["by"] == "a"
    other.rundir(job_id).revise(spec={"by": "b"})
    other.remote.publish(job_id)
    one.remote.refresh(job_id)
    assert one.rundir(job_id).read_spec()["spec"]["by"] == "b"
    keys = {file.key for file in index.read(one.bucket, job_id).files.values()}
    assert set(one.bucket.sizes(f"{job_id}/data")) == keys
