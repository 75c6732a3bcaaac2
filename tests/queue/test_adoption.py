"""Run directories that Redis does not know: they are listed, shown and resumed, by one daemon."""

from __future__ import annotations

import os
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import orjson
import pytest
from daemons import Daemon
from desks import Desk

from warmd.daemon.lifecycle import adopt
from warmd.daemon.queue import keys
from warmd.daemon.queue.jobs import EndedJob
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.errors import Conflict


def lose_redis(desk: Desk) -> None:
    """Lose the data of Redis, as when its folder is lost."""
    desk.client.connection.flushall()


def test_a_job_that_redis_lost_is_listed_shown_and_resumed(desk):
    job_id = desk.submit()
    run = desk.begin()
    run.step(1)
    run.stop()
    failed = desk.submit()
    desk.begin().fail("no reason")
    lose_redis(desk)
    assert {(row["id"], row["status"]) for row in desk.rows("jobs")} == {
        (job_id, "unregistered"),
        (failed, "unregistered"),
    }
    assert [row["id"] for row in desk.rows("jobs", "--limit", "1")] == [failed]
    assert len(desk.rows("jobs", "--status", "unregistered")) == 2
    shown = desk.warmd("show", job_id)
    assert "not in Redis" in shown.out
    assert "step          1/4" in shown.out
    assert "not in Redis" in desk.warmd("jobs").out
    assert desk.warmd("tail", job_id).code == 0
    assert desk.warmd("resume", job_id).out == f"{job_id} queued\n"
    (row,) = desk.rows("queue")
    assert (row["id"], row["status"], row["execution"]) == (job_id, "queued", 1)
    again = desk.begin()
    again.step(2)
    again.finish({"steps": 4})
    assert desk.rows("show", job_id)[0]["execution"] == 2


@pytest.mark.slow
def test_the_latest_job_is_known_without_redis_data(desk):
    desk.submit()
    latest = desk.submit()
    lose_redis(desk)
    assert desk.client.find(None) == latest


@pytest.mark.slow
def test_a_finished_job_from_elsewhere_stays_finished(desk, tmp_path):
    job_id = desk.submit()
    run = desk.begin()
    desk.client.rundir(job_id).write_result({"steps": 4}, revision=1)
    run.finish({"steps": 4})
    lose_redis(desk)
    assert desk.rows("result", job_id) == [{"steps": 4}]
    assert desk.warmd("resume", job_id).out == f"{job_id} finished\n"
    assert desk.rows("show", job_id)[0]["status"] == "finished"
    assert desk.rows("result", job_id) == [{"steps": 4}]


@pytest.fixture
def other(tmp_path: Path, desk: Desk):
    folder = tmp_path / "other"
    folder.mkdir()
    made = Desk(folder)
    yield made
    made.close()


@pytest.mark.slow
def test_a_copied_job_finds_its_initial_weights_in_its_new_folder(desk, other):
    branch = desk.submit_branch(desk.train())
    shutil.copytree(desk.home.runs / branch, other.home.runs / branch)
    assert other.warmd("resume", branch).out == f"{branch} queued\n"
    spec = other.client.rundir(branch).read_spec()
    assert spec["model"]["path"] == str(other.home.runs / branch / "init")


@pytest.mark.slow
def test_a_job_whose_model_is_not_on_this_machine_is_refused(desk):
    job_id = desk.submit()
    shutil.rmtree(Path(desk.client.rundir(job_id).read_spec()["model"]["path"]))
    lose_redis(desk)
    done = desk.warmd("resume", job_id)
    assert done.is_refusal(2)
    assert "needs the model folder" in done.err
    assert desk.rows("jobs")[0]["status"] == "unregistered"


def test_a_job_that_another_daemon_runs_is_not_taken(desk):
    job_id = desk.submit()
    lose_redis(desk)
    fd = RunDir(desk.home.runs / job_id).lock()
    for command in ("resume", "rm"):
        done = desk.warmd(command, job_id)
        assert done.is_refusal(2)
        assert "is running in another daemon" in done.err
    os.close(fd)
    assert desk.warmd("resume", job_id).code == 0


@pytest.mark.slow
def test_of_two_redis_on_one_folder_the_last_to_resume_owns_the_job(desk, other):
    job_id = desk.submit()
    shutil.rmtree(other.home.runs)
    other.home.runs.symlink_to(desk.home.runs)
    assert other.warmd("resume", job_id).out == f"{job_id} queued\n"
    rundir = desk.client.rundir(job_id)
    assert adopt.is_foreign(desk.client.connection, rundir)
    assert not adopt.is_foreign(other.client.connection, rundir)
    # The first one's worker refuses it: see Worker._begin. Its user takes it back by resume.
    desk.warmd("cancel", job_id)
    assert desk.warmd("resume", job_id).out == f"{job_id} queued\n"
    assert not adopt.is_foreign(desk.client.connection, rundir)


@pytest.mark.slow
def test_a_worker_of_the_other_redis_does_not_run_a_job_that_was_taken_over(
    shared_daemon: Daemon,
):
    daemon = shared_daemon
    job_id = daemon.submit(at=datetime.now().astimezone() + timedelta(seconds=2))
    daemon.client.rundir(job_id).annotate(redis="another")
    job = daemon.wait(job_id)
    assert job["status"] == "failed"
    assert "was taken over by another Redis" in job["error"]
    assert daemon.events(job_id) == []  # nothing was written where another one writes


def test_only_one_of_two_simultaneous_resumes_registers_the_job(desk):
    job_id = desk.submit()
    lose_redis(desk)
    past = adopt.past_of(RunDir(desk.home.runs / job_id))
    job = EndedJob(job_id, "train", **past.__dict__)
    assert desk.client.store.adopt_many([job]) == [job_id]
    assert not desk.client.store.adopt_many([job])
    assert desk.rows("show", job_id)[0]["status"] == "canceled"


@pytest.mark.slow
def test_a_folder_with_another_jobs_name_is_refused(desk):
    job_id = desk.submit()
    renamed = "grpo-20261121-184200-aaaa"
    shutil.copytree(desk.home.runs / job_id, desk.home.runs / renamed)
    done = desk.warmd("resume", renamed)
    assert done.is_refusal(2)
    assert f"holds {job_id}" in done.err
    with pytest.raises(Conflict):
        adopt.take_over(desk.client.connection, RunDir(desk.home.runs / renamed))


@pytest.mark.slow
def test_an_unreadable_folder_does_not_hide_other_jobs(desk):
    job_id = desk.submit()
    spoilt = desk.home.runs / "grpo-20261121-184200-aaaa"
    spoilt.mkdir()
    (spoilt / "spec.json").write_bytes(orjson.dumps({"schema": 99}))
    assert [row["id"] for row in desk.rows("jobs")] == [job_id]
    assert desk.warmd("show", spoilt.name).is_refusal(2)
    assert desk.client.connection.zscore(keys.jobs("train"), job_id) is not None
