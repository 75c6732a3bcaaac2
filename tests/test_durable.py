"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import signal
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from warmd.jobs.durable import whole_file, write_atomic


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


def test_an_error_leaves_the_former_file_and_nothing_else(tmp_path):
    path = tmp_path / "state"
    write_atomic(path, b"former")
    with pytest.raises(ValueError, match="closed file"), whole_file(path) as file:
        file.close()
    assert path.read_bytes() == b"former"
    assert names(tmp_path) == ["state"]


def test_what_a_killed_writer_left_is_written_over_by_the_next(tmp_path):
    path = tmp_path / "state"
    write_atomic(path, b"former")
    kill_while_writing(path)
    assert path.read_bytes() == b"former"
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["state"]


def test_writers_beside_each_other_take_turns(tmp_path):
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


def test_files_of_the_daemon_are_for_their_owner_alone(tmp_path):
    write_atomic(tmp_path / "state", b"secret")
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o600
