"""A program that runs experiments of equal time, one after another, through a real daemon."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import orjson
import pytest
import sft_jobs
from daemons import Daemon
from shell import warmd as command
from waiting import wait_until

import warmd
from warmd.configs.values import num_cores
from warmd.jobs.sft.options import SftSpec
from warmd.jobs.training.time_limit import FILE
from warmd.jobs.training.time_plan import DECAYS, Plan, rate

pytestmark = pytest.mark.slow

LIMIT, LIMIT_S = "2s", 2.0
KILLED = 1  # the number of the experiment that is killed
# The experiments are short and the machine may be busy: how far from its limit a job may end.
SLACK_S = 60.0


def plans(daemon: Daemon, job_id: str) -> list[Plan]:
    content = (daemon.home.runs / job_id / FILE).read_bytes()
    return [Plan(**plan) for plan in orjson.loads(content)["plans"]]


def assert_as_planned(daemon: Daemon, job: Any, learning_rate: float) -> dict[str, Any]:
    """Check that a job has done each step of its plans once, at the planned rates."""
    made, steps = plans(daemon, job.id), daemon.events(job.id, "step")
    result: dict[str, Any] = job.result()
    assert [event["step"] for event in steps] == list(range(1, made[-1].steps + 1))
    assert result["steps"] == result["plan"]["steps"] == made[-1].steps
    expected = [learning_rate * rate(made, DECAYS["linear"], 0, e["step"] - 1) for e in steps]
    assert [event["learning_rate"] for event in steps] == pytest.approx(expected)
    assert result["eval_after"]["n"] == 4
    assert (daemon.home.runs / job.id / "model" / "model.safetensors").is_file()
    info = job.info()
    assert (info["status"], info["step"], info["steps_total"]) == (
        "finished",
        made[-1].steps,
        made[-1].steps,
    )
    return result


def kill_in_its_steps(daemon: Daemon, job_id: str) -> int:
    """Kill the process of a job after its first plan; return the step that it had done."""
    wait_until(lambda: daemon.events(job_id, "plan"), timeout_s=60)
    holder = daemon.client.rundir(job_id).holder()
    assert holder is not None
    os.kill(holder, signal.SIGKILL)
    wait_until(lambda: len(daemon.events(job_id, "started")) > 1, timeout_s=60)
    steps = [e["step"] for e in daemon.events(job_id, "step") if e["execution"] == 1]
    return int(max(steps))


@pytest.mark.nightly(
    part="storms",
    catches="a job whose time differs from its time limit after a kill or with two ranks",
)
def test_a_loop_of_experiments_of_equal_time_by_a_program(sturdy: Daemon, tmp_path: Path):
    rows = sft_jobs.write(tmp_path / "rows.jsonl", sft_jobs.ROWS["prompt and completion"])
    experiments = [1e-4, 1e-3, 1e-2, 1e-3]
    found: list[tuple[float, float, str]] = []
    with warmd.connect(sturdy.home.path) as session:
        for number, learning_rate in enumerate(experiments):
            job = session.submit(
                "sft",
                model="tiny",
                dataset=rows,
                batch_size=2,
                learning_rate=learning_rate,
                eval_samples=4,
                save_every="20",
                processes=2 if number == len(experiments) - 1 and num_cores() > 1 else 1,
                time_limit=LIMIT,
            )
            if number == KILLED:
                killed_at = kill_in_its_steps(sturdy, job.id)
                known = [plan for plan in plans(sturdy, job.id) if plan.after <= killed_at]
            assert job.wait(timeout_s=120) == "finished", job.info()["error"]
            result = assert_as_planned(sturdy, job, learning_rate)
            assert result["plan"]["running_s"] < LIMIT_S + SLACK_S
            found.append((result["eval_after"]["loss"], learning_rate, job.id))
            if number == KILLED:
                begins = sturdy.events(job.id, "begin")
                assert [event["execution"] for event in begins] == [1, 2]
                made = plans(sturdy, job.id)
                assert made[: len(known)] == known
        best = min(found)
        told = command("tail", best[2], home=sturdy.home.path).out
        assert "plan: " in told
        assert "(time limit 2.0 s, " in told

        # A longer limit extends the best one; nothing else changes a finished job.
        def resume(*words: str) -> Any:
            return command("resume", best[2], *words, home=sturdy.home.path)

        same = resume("--time-limit", LIMIT)
        assert same.code == 0
        shorter = resume("--time-limit", "1s")
        assert shorter.code == 2
        assert f"time_limit: must be longer than 2s, which {best[2]} has used" in shorter.err
        steps = resume("--steps", "10000")
        assert steps.code == 2
        assert "time_limit: must not go with steps" in steps.err
        other = resume("--learning-rate", "1e-5")
        assert "is finished" in other.err
        before = session.job(best[2]).result()["steps"]
        assert resume("--time-limit", "4s").code == 0
        longer = session.job(best[2])
        assert longer.wait(timeout_s=120) == "finished"
        assert longer.result()["steps"] > before


@pytest.mark.nightly(
    part="storms", catches="a killed daemon whose jobs forget the plans of their time limit"
)
def test_a_daemon_that_is_killed_continues_the_plans_of_its_job(sturdy: Daemon, tmp_path: Path):
    rows = sft_jobs.write(tmp_path / "rows.jsonl", sft_jobs.ROWS["prompt and completion"])
    options = {"model": "tiny", "dataset": rows, "batch_size": 2, "learning_rate": 1e-3}
    options |= {"eval_samples": 4, "save_every": "20", "time_limit": "4s"}
    job_id = sturdy.client.jobs.submit(SftSpec.parse(options))
    wait_until(lambda: len(sturdy.events(job_id, "plan")) > 1, timeout_s=60)
    sturdy.kill_everything()
    known = plans(sturdy, job_id)
    sturdy.start()
    assert sturdy.wait(job_id, timeout_s=120)["status"] == "finished"
    made = plans(sturdy, job_id)
    assert made[: len(known)] == known
    # The running time of the execution that was killed counts.
    [first, second] = sturdy.events(job_id, "started")
    steps = [e for e in sturdy.events(job_id) if e["seq"] < second["seq"] and e["type"] == "step"]
    ran_s = steps[-1]["time"] - first["time"]
    if len(made) > len(known):
        assert made[len(known)].running_s > ran_s
    with warmd.connect(sturdy.home.path) as session:
        result = assert_as_planned(sturdy, session.job(job_id), 1e-3)
    assert result["plan"]["running_s"] > ran_s


def test_a_sweep_gives_every_job_the_same_time(sturdy: Daemon, tmp_path: Path):
    rows = sft_jobs.write(tmp_path / "rows.jsonl", sft_jobs.ROWS["prompt and completion"])
    options: dict[str, Any] = {"model": "tiny", "dataset": rows, "eval_samples": 4}
    options["time_limit"] = "1s"
    with warmd.connect(sturdy.home.path) as session:
        with pytest.raises(warmd.SpecError, match=r"^halving: must go with steps, got a time_lim"):
            session.sweep("sft", over={"learning_rate": [1e-3, 1e-2]}, halving=2, **options)
        sweep = session.sweep("sft", over={"learning_rate": [1e-4, 1e-2]}, **options)
        assert sweep.wait(timeout_s=120) == "finished"
    table = sturdy.client.groups.sweep(sweep.id)
    assert table["steps_total"] is None
    assert all(point["mean"] is not None for point in table["points"])
    assert table["best"] is not None
    shown = command("show", sweep.id, home=sturdy.home.path)
    assert shown.code == 0, shown.err


def test_a_dry_run_says_the_limit_and_verify_refuses_it(sturdy: Daemon, tmp_path: Path):
    rows = sft_jobs.write(tmp_path / "rows.jsonl", sft_jobs.ROWS["prompt and completion"])
    words = ("sft", rows, "--model", "tiny", "--time-limit", "1s")
    with_limit = command("submit", *words, "--dry-run", home=sturdy.home.path)
    assert with_limit.code == 0, with_limit.err
    assert "1.0 s of running time (time_limit)" in with_limit.out
    assert "repeated until the time limit" in with_limit.out
    submitted = command("submit", *words, home=sturdy.home.path)
    job_id = submitted.out.split()[-1]
    assert sturdy.wait(job_id)["status"] == "finished"
    for verify in ("--resume", "--trl"):
        refused = command("checkpoints", "verify", verify, job_id, home=sturdy.home.path)
        assert refused.code == 2
        assert f"job: must have steps, not a time limit, got {job_id}" in refused.err
    measured = command("submit", *words, "--dry-run", home=sturdy.home.path)
    assert "the steps are planned from their measured time: about" in measured.out
