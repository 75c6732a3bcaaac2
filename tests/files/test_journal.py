"""Journals: what a crash has left incomplete is cut, what is not of the job is never touched."""

from __future__ import annotations

import os

import pytest

from warmd.jobs.errors import JobFailed
from warmd.jobs.files.journal import Journal, begins_with, lines
from warmd.jobs.grpo.reward_log import RewardLog
from warmd.jobs.infer.batch_file import Answers

WHOLE = b'{"n": 1}\n{"n": 2}\n'


@pytest.mark.parametrize("rest", [b"", b'{"n": 3', b"\0\0\0\0", b"null\n{}\n", b"[3]\n", b"\xff\n"])
def test_records_end_at_the_first_line_that_a_crash_has_damaged(tmp_path, rest):
    path = tmp_path / "journal"
    path.write_bytes(WHOLE + rest)
    found = list(lines(path))
    assert found == [({"n": 1}, 9), ({"n": 2}, 18)]
    with Journal(path, found[-1][1]) as journal:
        journal.write(b'{"n": 4}\n', is_durable=True)
    assert path.read_bytes() == WHOLE + b'{"n": 4}\n'


def test_a_file_of_a_user_gets_the_umask_of_the_user(tmp_path):
    before = os.umask(0o027)
    try:
        Journal(tmp_path / "users", 0, is_users=True).close()
    finally:
        os.umask(before)
    assert (tmp_path / "users").stat().st_mode & 0o777 == 0o640


def test_the_beginning_of_a_file_may_be_incomplete(tmp_path):
    path = tmp_path / "journal"
    for content, expected in (
        (b"", True),
        (b"he", True),
        (b"head and more", True),
        (b"hex", False),
        (b"\0" * 9, True),
    ):
        path.write_bytes(content)
        assert begins_with(path, b"head") is expected


@pytest.mark.parametrize(
    "content", [b"a letter\n", b"a letter", b'{"row": 1}\n', b'{"job":"other"']
)
@pytest.mark.parametrize("opened", [RewardLog, Answers])
def test_a_file_that_is_not_of_the_job_is_left_as_it_is(tmp_path, opened, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    arguments = {"step": 3} if opened is RewardLog else {}
    with pytest.raises(JobFailed):
        opened(path, "own", **arguments)
    assert path.read_bytes() == content


@pytest.mark.parametrize("begin", [b"", b"\0" * 40])  # a part of the line; zeros
@pytest.mark.parametrize("opened", [RewardLog, Answers])
def test_a_first_line_that_a_crash_left_incomplete_is_written_again(tmp_path, opened, begin):
    path = tmp_path / "file"
    path.write_bytes(begin or (b'{"job":"ow' if opened is RewardLog else b'{"row":1,"job":"own",'))
    with opened(path, "own", **({"step": 0} if opened is RewardLog else {})):
        pass
    assert path.read_bytes() == b""
