"""`warmd rm` by name and by age: what it removes and keeps, and the state when it is killed."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from breadth import mostly_slow
from desks import Desk, Run

from warmd.configs.queues import QUEUES
from warmd.daemon.lifecycle import remove
from warmd.daemon.queue import keys
from warmd.daemon.runs.rundir import REMOVED


def finished(desk: Desk, *, days_ago: float = 0, model: bool = False) -> str:
    """A job of the command line that has finished, with a checkpoint and perhaps a model."""
    job_id = desk.submit()
    run = begin(desk, job_id)
    folder = desk.home.runs / job_id
    for name in ("checkpoints/checkpoint-4", *(["model"] if model else [])):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_bytes(b"{}")
        (folder / name / "weights").write_bytes(bytes(100_000))
    desk.client.rundir(job_id).write_result({"steps": 4}, revision=1)
    run.finish({"steps": 4})
    age(desk, job_id, days_ago)
    return job_id


def begin(desk: Desk, job_id: str) -> Run:
    """Take the jobs that wait, up to this one."""
    while (run := desk.begin()).id != job_id:
        run.stop()
    return run


def age(desk: Desk, job_id: str, days: float) -> None:
    ended = datetime.now(UTC) - timedelta(days=days)
    stamp = ended.strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    desk.client.connection.hset(f"rq:job:{job_id}", "ended_at", stamp)


def traces(desk: Desk, job_id: str) -> list[str]:
    """Every key, every index and every file that has the job's id in it."""
    connection = desk.client.connection
    found: Any = connection.keys(f"*{job_id}*")
    indices = (*map(keys.jobs, QUEUES), keys.of_kind("grpo"), keys.FROM_CLI, keys.ANSWERS)
    return [
        *map(str, found),
        *(key for key in indices if connection.zscore(key, job_id) is not None),
        *(str(path) for path in desk.home.runs.rglob(f"*{job_id}*")),
    ]


def test_rm_leaves_nothing_of_jobs_and_reports_the_bytes_freed(desk, monkeypatch):
    monkeypatch.chdir(desk.home.path)  # of a repository a job records the changes, of any size
    ids = [finished(desk), finished(desk)]
    done = desk.warmd("rm", *ids)
    assert done.code == 0, done.err
    assert [line.split()[0] for line in done.out.splitlines()] == ids
    assert done.err.startswith("freed 20")
    assert [traces(desk, job_id) for job_id in ids] == [[], []]
    assert desk.rows("jobs") == []
    assert desk.warmd("rm", ids[0]).is_refusal(2)


@pytest.mark.slow
def test_rm_prints_json(desk):
    job_id = finished(desk)
    (row,) = desk.rows("rm", job_id)
    assert (row["id"], row["removed"]) == (job_id, True)
    assert row["bytes"] > 100_000


def test_rm_refuses_jobs_that_run_or_wait_and_then_removes_none(desk):
    done_one, running, waiting = finished(desk), desk.submit(), desk.submit()
    begin(desk, running)
    for job_id, status in ((running, "started"), (waiting, "queued")):
        refusal = desk.warmd("rm", done_one, job_id)
        assert refusal.is_refusal(2)
        assert f"{job_id} is {status}: cancel it first" in refusal.err
    assert traces(desk, done_one)


@pytest.mark.slow
def test_rm_refuses_a_job_while_another_job_needs_it(desk):
    parent = finished(desk, model=True)
    behind = desk.submit("--after", desk.submit())
    first = desk.client.jobs.get(behind)["after"][0]
    begin(desk, first).fail("no reason")
    refusal = desk.warmd("rm", first)
    assert refusal.is_refusal(2)
    assert behind in refusal.err
    reader = desk.submit("--model", parent)  # the last --model counts
    refusal = desk.warmd("rm", parent)
    assert refusal.is_refusal(2)
    assert reader in refusal.err
    run = begin(desk, reader)
    run.fail("no reason")
    assert desk.warmd("rm", parent).is_refusal(2)  # it may be resumed
    desk.client.rundir(reader).write_result({"steps": 4}, revision=1)
    assert desk.warmd("rm", parent).code == 0
    desk.warmd("cancel", behind)
    assert desk.warmd("rm", first).code == 0


def test_two_jobs_that_need_each_other_can_be_removed_together(desk):
    parent = finished(desk, model=True)
    reader = desk.submit("--model", parent)
    begin(desk, reader).fail("no reason")
    assert desk.warmd("rm", parent, reader).code == 0
    assert traces(desk, parent) + traces(desk, reader) == []


def test_a_branch_with_its_own_checkpoint_no_longer_needs_its_parent(desk):
    parent = finished(desk, model=True)
    branch = desk.submit_branch(parent)
    assert desk.warmd("rm", parent).code == 0
    weights = desk.home.runs / branch / "init" / "weights"
    assert weights.stat().st_size == 100_000


def test_removal_by_age_takes_only_jobs_of_the_age_and_statuses(desk, monkeypatch):
    monkeypatch.chdir(desk.home.path)  # as above
    old, young = finished(desk, days_ago=40), finished(desk, days_ago=20)
    failed = desk.submit()
    begin(desk, failed).fail("no reason")
    age(desk, failed, 40)
    waiting = desk.submit()
    shown = desk.warmd("rm", "--older-than", "30d", "--status", "finished", "--dry-run")
    assert shown.out.split()[0] == old
    assert shown.err.startswith("would free 10")
    assert traces(desk, old)
    assert [row["id"] for row in desk.rows("rm", "--older-than", "30d")] == [failed, old]
    assert traces(desk, old) + traces(desk, failed) == []
    assert traces(desk, young)
    assert traces(desk, waiting)
    assert desk.warmd("rm", "--older-than", "30d").err == "nothing to remove\n"


def test_keep_models_keeps_models(desk):
    job_id = finished(desk, days_ago=40, model=True)
    (row,) = desk.rows("rm", "--older-than", "30d", "--keep-models")
    assert row["bytes"] == 100_002
    assert (desk.home.runs / job_id / "model" / "weights").is_file()
    assert not (desk.home.runs / job_id / "checkpoints").exists()
    assert desk.rows("rm", "--older-than", "30d", "--keep-models") == []
    done = desk.warmd("resume", job_id, "--steps", "9")
    assert done.is_refusal(2)
    assert f"--init-from {job_id}" in done.err
    assert desk.rows("show", job_id)[0]["status"] == "finished"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--older-than", "30"), "older_than: must have a unit"),
        (("--older-than", "30d", "--status", "started"), "status: must be some of finished,"),
        ((), "job: must be named, or older_than be given"),
        (("grpo-1", "--older-than", "30d"), "older_than: must not go with a JOB"),
        (("grpo-1", "--dry-run"), "dry_run: must go with older_than"),
        (("grpo-1", "--keep-models"), "keep_models: must go with older_than"),
        (("grpo-1", "--status", "failed"), "status: must go with older_than"),
    ],
)
def test_impossible_options_are_refused(desk, arguments, words):
    done = desk.warmd("rm", *arguments)
    assert done.is_refusal(2)
    assert words in done.err


def test_files_that_were_removed_by_hand_show_and_rm_removes_the_record(desk):
    job_id = finished(desk)
    shutil.rmtree(desk.home.runs / job_id)
    (row,) = desk.rows("jobs")
    assert (row["id"], row["status"]) == (job_id, "finished")
    assert "files are gone" in desk.warmd("jobs").out
    assert "files are gone" in desk.warmd("show", job_id).out
    assert desk.warmd("rm", job_id).code == 0
    assert traces(desk, job_id) == []


def remove_and_die(desk: Desk, job_id: str, at: str) -> None:
    """Begin to remove a job in this process, and kill it."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    target: Any = {"record": desk.client.store, "files": shutil}[at]
    setattr(target, {"record": "remove", "files": "rmtree"}[at], die)
    remove.remove(desk.client.places, job_id)


@pytest.mark.parametrize("at", ["record", "files"])
@pytest.mark.parametrize("is_by_age", mostly_slow([False, True], but=[True]))
def test_the_next_removal_finishes_an_interrupted_one(desk, at, is_by_age):
    job_id = finished(desk, days_ago=40)
    desk.client.close()
    process = multiprocessing.get_context("fork").Process(
        target=remove_and_die, args=(desk, job_id, at)
    )
    process.start()
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    left = set(os.listdir(desk.home.runs)) - {".lock"}  # of the killed process, too
    assert left == {f"{REMOVED}{job_id}"}
    arguments = ("--older-than", "30d") if is_by_age else (job_id,)
    (row,) = desk.rows("rm", *arguments)
    assert row["id"] == job_id
    assert traces(desk, job_id) == []


def test_a_job_that_is_resumed_during_its_removal_keeps_its_files(desk):
    job_id = desk.submit()
    begin(desk, job_id).stop()
    (desk.home.runs / job_id).rename(desk.home.runs / f"{REMOVED}{job_id}")
    job = desk.client.store.fetch(job_id)
    assert job is not None
    assert desk.client.store.enqueue_again(job)
    assert desk.client.jobs.finish_removals() == {}
    assert desk.rows("show", job_id)[0]["problem"] is None


def test_removal_by_age_takes_a_chain_of_jobs_from_its_end(desk):
    parent = finished(desk, days_ago=40, model=True)
    reader = desk.submit("--model", parent)
    begin(desk, reader).fail("no reason")
    stays = desk.warmd("rm", "--older-than", "30d")
    assert f"{parent} is kept: it is still needed by {reader}" in stays.err
    age(desk, reader, 40)
    assert [row["id"] for row in desk.rows("rm", "--older-than", "30d")] == [reader, parent]


def test_a_home_path_with_a_symlink_is_recognized_as_the_same_home(desk, tmp_path: Path):
    job_id = finished(desk, model=True)
    link = tmp_path / "link"
    link.symlink_to(desk.home.runs)
    assert remove.owner_of(link, str(desk.home.runs / job_id / "model")) == job_id


def test_a_job_is_needed_by_the_path_that_it_has_on_another_machine(desk: Desk):
    job_id = desk.submit()
    elsewhere = f"/home/of/another/runs/{job_id}/model"
    assert remove.owner_of(desk.home.runs, elsewhere) == job_id
    assert remove.owner_of(desk.home.runs, "/models/base/model") is None
    reader = desk.submit("--lora", "4")
    rundir = desk.client.rundir(reader)
    rundir.annotate(model={"name": job_id, "path": elsewhere})
    rundir.write_result({}, revision=1)
    found = remove.dependents(desk.home.runs, [reader])
    assert found == {job_id: [reader]}  # its adapter is in a run store alone
