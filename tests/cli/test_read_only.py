"""A stopped home that cannot be written: an archive, a snapshot, a rescued disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from desks import Desk
from shell import warmd
from small_disks import read_only


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A home with a finished job, whose Redis has ended."""
    folder = tmp_path_factory.mktemp("desk")
    desk = Desk(folder)
    job_id = desk.submit()
    run = desk.begin()
    run.step(1)
    run.finish({"steps": 1})
    rundir = desk.client.rundir(job_id)  # a work horse writes the result there
    rundir.write_result({"steps": 1}, revision=rundir.read_spec()["revision"])
    desk.close()
    (desk.home.path / "daemon.lock").touch()  # a daemon leaves one
    return desk.home.path, job_id


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("jobs --all", "finished"),
        ("show JOB", "finished"),
        ("result JOB", "steps"),
        ("tail JOB", "finished"),
        ("checkpoints list JOB", "nothing to show"),
        ("jobs --since 12h", "finished"),
    ],
)
def test_a_home_on_a_read_only_disk_is_read(
    archive: tuple[Path, str], tmp_path: Path, command: str, words: str
):
    home, job_id = archive
    with read_only(home, tmp_path) as at:
        done = warmd(*command.replace("JOB", job_id).split(), home=at)
        assert done.code == 0, done.err
        assert words in done.out + done.err


def test_a_daemon_is_not_started_on_a_read_only_disk(archive: tuple[Path, str], tmp_path: Path):
    home, _ = archive
    with read_only(home, tmp_path) as at:
        done = warmd("start", home=at)
        assert done.is_refusal(2)
        assert "home: must be a writable folder" in done.err
