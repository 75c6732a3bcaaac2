"""Processes started by a job's code affect no other job, and end with their job."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from daemons import Daemon, gone
from waiting import wait_until

from warmd.configs.config import WorkerConfig

pytestmark = pytest.mark.slow


def left_behind(daemon: Daemon) -> list[psutil.Process]:
    """The processes that the reward has started and that still live."""
    path = daemon.folder / "processes"
    noted = [int(pid) for pid in path.read_text().split()] if path.exists() else []
    found = []
    for pid in noted:
        with suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return [process for process in found if not gone(process)]


@pytest.fixture
def clean(sturdy: Daemon) -> Daemon:
    (sturdy.folder / "processes").unlink(missing_ok=True)
    return sturdy


def begin_with_processes(daemon: Daemon) -> str:
    """Start a job that has left processes, and stands."""
    (daemon.folder / "gate").touch()
    job = daemon.submit("behaviours:leaves_processes", samples=2)
    wait_until((daemon.folder / "processes").exists)
    assert len(left_behind(daemon)) == 2
    return job


def test_processes_started_by_a_reward_end_with_the_job(clean):
    job = clean.submit("behaviours:leaves_processes", samples=3, save_every=1)
    assert clean.wait(job)["status"] == "finished"
    assert left_behind(clean) == []
    log = clean.client.rundir(job).log.read_text()
    assert "processes that the job had left running" in log


def test_a_killed_job_leaves_no_process_behind(clean):
    job = begin_with_processes(clean)
    clean.client.jobs.kill(job)
    assert clean.wait(job)["status"] == "stopped"
    wait_until(lambda: not left_behind(clean))
    # Nor do they keep the job's files locked.
    (clean.folder / "gate").unlink()
    clean.client.jobs.resume(job)
    assert clean.wait(job)["status"] == "finished"


def test_a_job_whose_horse_is_killed_leaves_no_process_and_resumes(clean):
    job = begin_with_processes(clean)
    (clean.folder / "gate").unlink()
    clean.kill("horse")
    assert clean.wait(job)["status"] == "finished"
    assert left_behind(clean) == []


def test_stop_now_leaves_no_process_behind(clean):
    begin_with_processes(clean)
    clean.stop(now=True)
    wait_until(lambda: not left_behind(clean))


@pytest.mark.nightly(
    part="daemons", catches="processes of a job that outlive a zygote and a horse killed at once"
)
def test_a_zygote_that_is_killed_with_its_horse_leaves_no_process_behind(clean):
    begin_with_processes(clean)
    zygote, horse = clean.pid("zygote"), clean.pid("horse")
    os.kill(zygote, 9)
    os.kill(horse, 9)
    clean.stop(now=True)
    wait_until(lambda: not left_behind(clean))


def test_a_reward_that_forks_and_returns_twice_is_trained_on_once(clean):
    job = clean.submit("behaviours:forks", samples=6, save_every=1)
    assert clean.wait(job)["status"] == "finished"
    assert [event["step"] for event in clean.events(job, "step")] == [1, 2, 3, 4, 5, 6]
    numbers = [event["seq"] for event in clean.events(job)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert "was forked by the job's code" in clean.client.rundir(job).log.read_text()


def test_a_reward_may_score_in_a_pool_of_processes(clean):
    job = clean.submit("behaviours:pooled", samples=4, save_every=1)
    assert clean.wait(job)["status"] == "finished"


def test_an_error_message_of_ten_megabytes_fails_the_job_once_and_is_truncated(clean):
    job = clean.wait(clean.submit("behaviours:long_message"))
    assert job["status"] == "failed"
    assert job["execution"] == 1
    here = Path(__file__).parents[1] / "support"
    assert job["error"].startswith(
        f"reward behaviours:long_message failed at {here / 'behaviours.py'}:"
    )
    assert len(job["error"]) < 1500
    rundir = clean.client.rundir(job["id"])
    assert rundir.events.stat().st_size < 20_000
    log = rundir.log.read_text()
    assert "in long_message" in log
    assert "characters left out" in log
    assert len(log) < 100_000


@pytest.mark.nightly(
    part="daemons", catches="code or processes of a job that stay in a resident horse"
)
def test_a_resident_worker_imports_user_code_afresh_for_each_job_and_ends_its_processes(
    make_daemon, tmp_path
):
    worker = WorkerConfig(name="train-0", queue="train", threads=1, isolation="resident")
    daemon = make_daemon(workers=(worker,))
    daemon.start()
    code = "def f(p, c, a):\n    print('scored by', {number})\n    return [0.0] * len(c)\n"
    for number in (1, 2):
        folder = tmp_path / str(number % 2)
        folder.mkdir(exist_ok=True)
        (folder / "mine.py").write_text(code.format(number=number))
        job = daemon.submit("mine:f", folder=folder, samples=1)
        assert daemon.wait(job)["status"] == "finished"
        assert f"scored by {number}" in daemon.client.rundir(job).log.read_text()
    (tmp_path / "0" / "mine.py").write_text(code.format(number=3))
    job = daemon.submit("mine:f", folder=tmp_path / "0", samples=1)
    assert daemon.wait(job)["status"] == "finished"
    assert "scored by 3" in daemon.client.rundir(job).log.read_text()
    job = daemon.submit("behaviours:pooled", samples=2)
    assert daemon.wait(job)["status"] == "finished"
    horse = psutil.Process(daemon.pid("horse"))
    assert [child for child in horse.children(recursive=True) if not gone(child)] == []
