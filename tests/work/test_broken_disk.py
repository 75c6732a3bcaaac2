"""A broken disk fails its job at once; on a good disk the job resumes exactly.

The run directories of a real daemon are on a real file system that is shut down (each access to it
is an I/O error, EIO), or that becomes read-only, as ext4 does after an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemons import Daemon
from disturbing import STEPS, MakeDaemon, hold, let_go, steps, weights
from power import Disk, disk_without_power
from shell import warmd

pytestmark = pytest.mark.nightly(
    part="shortages", catches="a job that waits for a disk that is broken"
)


@pytest.fixture
def broken(make_daemon: MakeDaemon, tmp_path: Path) -> Iterator[tuple[Daemon, Disk]]:
    """A daemon whose run directories are on a disk that can be shut down."""
    daemon = make_daemon()
    daemon.home.runs.mkdir(mode=0o700, parents=True)
    daemon.home.path.chmod(0o700)
    with disk_without_power(daemon.home.runs, tmp_path / "disk.img") as disk:
        daemon.start()
        yield daemon, disk
        daemon.close()


@pytest.mark.parametrize(
    ("break_disk", "reason"),
    [
        (Disk.lose_power, "Input/output error"),
        (Disk.become_read_only, "Read-only file system"),
    ],
    ids=["EIO", "read-only"],
)
def test_a_broken_disk_fails_the_job_with_the_path_and_the_job_resumes_exactly(
    broken: tuple[Daemon, Disk], break_disk: Callable[[Disk], None], reason: str
):
    daemon, disk = broken
    undisturbed = daemon.submit(save_every=1)
    assert daemon.wait(undisturbed)["status"] == "finished"
    job_id = hold(daemon)
    break_disk(disk)
    let_go(daemon)
    failed = daemon.wait(job_id)
    assert (failed["status"], failed["waits_for"], failed["execution"]) == ("failed", None, 1)
    assert not any(event["type"] == "waiting" for event in daemon.streamed(job_id))
    assert f"{reason}: '{daemon.home.runs / job_id}" in failed["error"]
    disk.come_back()
    daemon.client.jobs.resume(job_id)
    ended = daemon.wait(job_id)
    assert (ended["status"], ended["execution"]) == ("finished", 2)
    assert steps(daemon, job_id) == STEPS
    assert weights(daemon, job_id) == weights(daemon, undisturbed)
    events = daemon.events(job_id)  # with `failed`, which only Redis had
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert [event["type"] for event in events].count("failed") == 1
    assert [event["resumed_from"] for event in events if event["type"] == "begin"] == [None, 2]
    in_redis = daemon.streamed(job_id)
    assert in_redis == events[-len(in_redis) :]


def test_doctor_names_what_it_cannot_read_and_checks_the_rest(tmp_path: Path):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    with disk_without_power(home, tmp_path / "disk.img") as disk:
        (home / "daemon.lock").touch()
        disk.lose_power()
        done = warmd("doctor", home=home)
    assert done.code == 1
    assert "fail  daemon      [Errno 5] Input/output error" in done.out
    assert "processor" in done.out
