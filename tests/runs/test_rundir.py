"""The lock of a run directory, for which horses of several machines may compete."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from waiting import wait_until

from warmd.daemon.runs.rundir import RunDir, job_ids, remove_stale_staging
from warmd.jobs.errors import Conflict
from warmd.jobs.ids import by_time

# Takes the lock, prints a line, and holds it until it is killed or its stdin ends.
HOLD = """
import sys
from pathlib import Path
from warmd.daemon.runs.rundir import RunDir
fd = RunDir(Path(sys.argv[1])).lock()
print(fd, flush=True)
sys.stdin.read()
"""


def test_incomplete_run_directories_of_dead_clients_are_removed_and_new_ones_stay(tmp_path):
    old, new = (
        tmp_path / ".new-grpo-20261121-101500-2345",
        tmp_path / ".new-grpo-20261121-111500-2345",
    )
    for folder in (old, new):
        folder.mkdir()
        (folder / "spec.json").touch()
    os.utime(old, (0, 0))
    whole = RunDir.create(tmp_path, "grpo", {"spec": {}})
    remove_stale_staging(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {new.name, whole.path.name}


def made_in(runs: Path, zone: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        return RunDir.create(runs, "grpo", {"spec": {}}, durable=False).path.name
    finally:
        monkeypatch.undo()
        time.tzset()


def test_ids_sort_by_their_time_whatever_the_time_zone(tmp_path, monkeypatch):
    zones = ["Asia/Tokyo", "America/Los_Angeles", "UTC", "Pacific/Kiritimati"]
    ids = [made_in(tmp_path, zone, monkeypatch) for zone in zones]
    assert sorted(ids, key=by_time) == ids
    assert {job_id[:16] for job_id in ids} == {time.strftime("grpo-%Y%m%d-%H", time.gmtime())} or (
        time.gmtime().tm_min == 0  # the hour ended meanwhile
    )


def test_ids_sort_by_creation_even_if_the_clock_is_set_back(tmp_path, monkeypatch):
    before = RunDir.create(tmp_path, "grpo", {"spec": {}}, durable=False).path.name
    hour_ago = time.time_ns() - 3_600_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: hour_ago)
    after = RunDir.create(tmp_path, "grpo", {"spec": {}}, durable=False).path.name
    assert by_time(after) > by_time(before)


def test_an_existing_job_id_is_not_reused(tmp_path, monkeypatch):
    first = RunDir.create(tmp_path, "grpo", {"spec": {}}, durable=False)
    for slot in (1, 2):
        monkeypatch.setattr("warmd.jobs.ids._slots.take", iter([slot, slot, slot + 9]).__next__)
        made = [RunDir.create(tmp_path, "grpo", {"spec": {}}, durable=slot == 1) for _ in range(2)]
        assert len({path.path for path in made}) == 2
    assert len(job_ids(tmp_path)) == 5
    assert first.read_spec()["id"] == first.path.name
    assert not list(tmp_path.glob(".new-*"))


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, "grpo", {"spec": {}})


@contextmanager
def holding(rundir: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    """A process that holds the lock."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(rundir.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:  # closes the pipes, and waits
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def horse(rundir: RunDir) -> Iterator[subprocess.Popen[bytes]]:
    with holding(rundir) as process:
        yield process


def lock_in_background(rundir: RunDir) -> tuple[threading.Thread, list[int]]:
    taken: list[int] = []
    thread = threading.Thread(target=lambda: taken.append(rundir.lock(patience_s=0.2)), daemon=True)
    thread.start()
    return thread, taken


def test_horse_that_holds_the_lock_for_too_long_is_killed(rundir, horse):
    assert rundir.holder() == horse.pid
    fd = rundir.lock(patience_s=0.2)
    assert horse.wait(5) == -signal.SIGKILL
    os.close(fd)
    assert rundir.holder() is None


SIGNATURES = {
    "pid alone": b"%d",
    "another machine": b"%d 1 0b5e",
    "nothing": b"",
    "junk": b"%d\n\0 junk",
    "no pid": b"99999999999999999999 1 2",
}


def test_a_process_of_another_container_with_the_same_id_and_start_time_is_not_killed(
    rundir, horse
):
    lock = rundir.path / "lock"
    own = os.readlink("/proc/self/ns/pid")
    signature = lock.read_bytes()
    assert signature.endswith(own.encode())
    lock.write_bytes(signature.replace(own.encode(), b"pid:[1]"))
    assert rundir.holder() is None
    assert rundir.is_held()
    thread, taken = lock_in_background(rundir)
    thread.join(0.6)  # three times its patience
    assert thread.is_alive()
    assert horse.poll() is None
    lock.write_bytes(signature)
    wait_until(lambda: taken, timeout_s=5)
    assert horse.wait(5) == -signal.SIGKILL
    os.close(taken[0])


@pytest.mark.slow
def test_a_process_that_did_not_take_the_lock_here_is_not_killed(tmp_path):
    with ExitStack() as horses:
        waiting = {}
        for name, signature in SIGNATURES.items():
            rundir = RunDir.create(tmp_path, "grpo", {"spec": {}})
            horse = horses.enter_context(holding(rundir))
            path = rundir.path / "lock"
            path.write_bytes(signature % horse.pid if b"%d" in signature else signature)
            assert rundir.holder() is None, name
            waiting[name] = (horse, *lock_in_background(rundir))
        until = time.monotonic() + 1.0  # five times their patience
        for name, (horse, thread, taken) in waiting.items():
            thread.join(max(0.0, until - time.monotonic()))
            assert thread.is_alive(), name
            assert horse.poll() is None, name
            horse.kill()
            thread.join(5)
            (fd,) = taken
            os.close(fd)


def test_a_process_that_prevents_executions_for_a_moment_is_not_killed(rundir, horse):
    with pytest.raises(Conflict), rundir.unused():
        pass
    horse.kill()
    horse.wait()
    with rundir.unused():
        thread, taken = lock_in_background(rundir)
        thread.join(0.6)
        assert thread.is_alive()
        assert rundir.holder() is None
    wait_until(lambda: taken, timeout_s=5)
    os.close(taken[0])
