"""Atomic writes: a file is complete or absent."""

from __future__ import annotations

import fcntl
import os
import signal
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from fcntl import LOCK_EX, LOCK_NB, LOCK_UN
from pathlib import Path

import pytest

from warmd.jobs.files import atomic
from warmd.jobs.files.atomic import (
    locked,
    recover,
    scratch_folder,
    whole_file,
    whole_folder,
    write_atomic,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def kill_while_writing(path: Path) -> None:
    child = os.fork()
    if child == 0:
        with whole_file(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def test_an_error_leaves_the_previous_file_and_nothing_else(tmp_path):
    path = tmp_path / "state"
    write_atomic(path, b"former")
    with pytest.raises(ValueError, match="closed file"), whole_file(path) as file:
        file.close()
    assert path.read_bytes() == b"former"
    assert names(tmp_path) == ["state"]


def test_leftovers_of_a_killed_writer_are_overwritten_by_the_next(tmp_path):
    path = tmp_path / "state"
    write_atomic(path, b"former")
    kill_while_writing(path)
    assert path.read_bytes() == b"former"
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["state"]


def test_concurrent_writers_of_a_file_wait_for_each_other(tmp_path):
    path = tmp_path / "state"
    contents = [bytes([65 + index]) * (1 << 16) for index in range(16)]
    begin = threading.Barrier(4)

    def write(mine: list[bytes]) -> None:
        begin.wait(10)
        for content in mine * 10:
            write_atomic(path, content)
            assert path.read_bytes() in contents

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, [contents[index::4] for index in range(4)]))
    assert names(tmp_path) == ["state"]


def test_only_their_owner_can_read_files_of_the_daemon(tmp_path):
    write_atomic(tmp_path / "state", b"secret")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600


@contextmanager
def forked_child() -> Iterator[None]:
    """A process that was forked here with copies of all open files, and lives during the block."""
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        yield
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_process_forked_while_a_file_is_written_blocks_nobody(tmp_path):
    with ExitStack() as children:
        with whole_file(tmp_path / "state") as file:
            file.write(b"former")
            children.enter_context(forked_child())
        with locked(tmp_path, LOCK_EX | LOCK_NB):
            pass
        write_atomic(tmp_path / "state", b"new")
    assert (tmp_path / "state").read_bytes() == b"new"


def test_a_process_forked_while_a_folder_is_written_blocks_nobody(tmp_path):
    with ExitStack() as children:
        for content in ("former", "new"):
            with whole_folder(tmp_path / "model", while_waiting=pytest.fail) as staging:
                (staging / "weights").write_text(content)
                children.enter_context(forked_child())
    assert (tmp_path / "model" / "weights").read_text() == "new"
    assert names(tmp_path) == ["model"]


def test_a_process_forked_while_a_folder_itself_is_locked_blocks_nobody(tmp_path):
    """As on a full disk, which has no room for the lock file."""
    with ExitStack() as children:
        with atomic._held_folder(tmp_path, LOCK_EX):
            children.enter_context(forked_child())
        with atomic._held_folder(tmp_path, LOCK_EX | LOCK_NB):
            pass


def test_different_folders_are_written_concurrently(tmp_path):
    with whole_folder(tmp_path / "a") as a, whole_folder(tmp_path / "b") as b:
        (a / "file").touch()
        (b / "file").touch()
    assert names(tmp_path) == ["a", "b"]


def test_waiting_for_the_writer_of_a_folder_can_be_stopped(tmp_path):
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    with whole_folder(tmp_path / "a") as staging:
        with pytest.raises(Stop), whole_folder(tmp_path / "a", while_waiting=stop):
            pytest.fail("it is being written")
        (staging / "file").touch()
    assert names(tmp_path / "a") == ["file"]


def test_leftovers_of_a_killed_writer_of_a_folder_are_removed_and_those_of_a_living_one_stay(
    tmp_path,
):
    child = os.fork()
    if child == 0:
        with whole_folder(tmp_path / "dead") as staging:
            (staging / "half").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert names(tmp_path) == [".lock-dead", ".staging-dead"]
    with whole_folder(tmp_path / "alive"):
        recover(tmp_path)
        assert names(tmp_path) == [".lock-alive", ".staging-alive"]


def test_a_scratch_folder_ends_with_its_block_or_after_a_kill_with_the_next_one(tmp_path):
    child = os.fork()
    if child == 0:
        with scratch_folder(tmp_path) as scratch:
            (scratch / "half").touch()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    [lock, left] = names(tmp_path)
    assert left.startswith(".staging-scratch-")
    with scratch_folder(tmp_path) as one, scratch_folder(tmp_path) as other:
        (one / "file").touch()
        assert len(names(tmp_path)) == 4
        assert not {lock, left} & set(names(tmp_path))
        assert names(other) == []
    assert names(tmp_path) == []


def test_locks_are_on_files_that_are_open_for_writing_as_nfs_wants(tmp_path, monkeypatch):
    """NFS ignores flock on folders, and refuses exclusive locks on files open for reading."""
    taken = []

    def flock(descriptor: int, how: int) -> None:
        if how != LOCK_UN:
            mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            taken.append((stat.S_ISREG(os.fstat(descriptor).st_mode), mode != os.O_RDONLY))
        real(descriptor, how)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    write_atomic(tmp_path / "state", b"x")
    with whole_folder(tmp_path / "model") as staging:
        (staging / "weights").touch()
    recover(tmp_path)
    with locked(tmp_path):
        pass
    assert set(taken) == {(True, True)}
    assert names(tmp_path) == ["model", "state"]


def test_one_of_many_processes_at_a_time_holds_the_lock_of_a_folder(tmp_path):
    inside, most = 0, 0

    def enter(_: int) -> None:
        nonlocal inside, most
        with locked(tmp_path):
            inside += 1
            most = max(most, inside)
            os.sched_yield()
            inside -= 1

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(enter, range(400)))
    assert most == 1
    assert names(tmp_path) == []
