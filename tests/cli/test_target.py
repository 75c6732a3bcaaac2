"""Commands without a JOB: the job that they show or act on, and when they refuse to choose."""

from __future__ import annotations

import pytest
from breadth import mostly_slow
from desks import Desk

from warmd.jobs import spec_class


def ask_over_http(desk: Desk, origin: str = "http") -> str:
    """A job that was not submitted from the command line."""
    model = desk.grpo[3]
    spec = spec_class("infer").parse({"model": model, "prompt": "a"})
    return desk.client.jobs.submit(spec, origin=origin)


@pytest.mark.parametrize("origin", mostly_slow(["http", "check"], but=["http"]))
def test_commands_default_to_the_latest_job_of_the_command_line(desk, origin):
    job_id = desk.submit()
    ask_over_http(desk, origin)
    assert desk.rows("show")[0]["id"] == job_id
    assert desk.rows("show", "-")[0]["id"] == job_id
    assert job_id in desk.warmd("result").err
    desk.begin().step(1)
    assert job_id in desk.warmd("plot").out
    assert desk.warmd("checkpoints", "list").code == 0


def test_http_requests_are_never_the_latest_job(desk):
    ask_over_http(desk)
    done = desk.warmd("show")
    assert done.is_refusal(2)
    assert "`warmd submit` creates one" in done.err


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("cancel", "stopping"),
        pytest.param("cancel --now", "killing", marks=pytest.mark.slow),
        pytest.param("pause", "pausing", marks=pytest.mark.slow),
    ],
)
def test_the_only_running_job_is_the_default_even_if_others_wait(desk, command, outcome):
    running = desk.submit()
    desk.begin()
    desk.submit()
    ask_over_http(desk)
    assert desk.warmd(*command.split()).out == f"{running} {outcome}\n"


@pytest.mark.parametrize(
    ("command", "outcome"),
    [
        ("cancel", "canceled"),
        pytest.param("cancel --now", "canceled", marks=pytest.mark.slow),
        pytest.param("pause", "paused", marks=pytest.mark.slow),
    ],
)
def test_without_a_running_job_the_only_waiting_one_is_the_default(desk, command, outcome):
    waiting = desk.submit()
    ask_over_http(desk)
    assert desk.warmd(*command.split()).out == f"{waiting} {outcome}\n"


@pytest.mark.parametrize(
    "command", mostly_slow(["cancel", "cancel --now", "pause"], but=["cancel"])
)
@pytest.mark.parametrize("do_run", [True, False])
def test_several_candidates_are_listed_with_the_commands_to_type(desk, command, do_run):
    ids = [desk.submit(), desk.submit()]
    if do_run:
        desk.begin(), desk.begin()
    done = desk.warmd(*command.split())
    assert done.code == 2
    *lines, error = done.err.splitlines()
    assert error == f"Error: job: must be named: {command} may mean any of 2 jobs"
    status = "started" if do_run else "queued"
    home = f"--home {desk.home.path}"
    assert sorted(lines) == sorted(f"warmd {command} {j} {home}  # {status}" for j in ids)
    assert {row["status"] for row in desk.rows("queue")} == {status}


@pytest.mark.parametrize("command", ["cancel", "cancel --now", "pause"])
def test_jobs_of_http_clients_are_never_the_default(desk, command):
    ask_over_http(desk)
    done = desk.warmd(*command.split())
    assert done.is_refusal(2)
    assert f"nothing to {command}" in done.err
    assert [row["status"] for row in desk.rows("queue")] == ["queued"]


def test_resume_defaults_to_the_only_paused_job_and_else_to_the_latest(desk):
    paused, also, latest = desk.submit(), desk.submit(), desk.submit()
    ask_over_http(desk)
    desk.warmd("pause", paused)
    assert desk.warmd("resume").out == f"{paused} queued\n"
    for job_id in (paused, also):
        desk.warmd("pause", job_id)
    done = desk.warmd("resume")
    assert done.code == 2
    assert done.err.endswith("Error: job: must be named: resume may mean any of 2 jobs\n")
    for job_id in (paused, also):
        assert desk.warmd("resume", job_id).out == f"{job_id} queued\n"
    assert f"job: {latest} is queued: nothing to resume" in desk.warmd("resume").err
    desk.warmd("pause", paused)
    with_options = desk.warmd("resume", "--steps", "9")
    assert f"job: {latest} is queued: nothing to resume" in with_options.err


def test_options_of_a_paused_job_are_not_changed(desk):
    job_id = desk.submit()
    desk.warmd("pause", job_id)
    done = desk.warmd("resume", "--steps", "9")
    assert done.is_refusal(2)
    assert f"job: {job_id} is paused: without options it continues unchanged" in done.err


def test_a_paused_job_is_not_paused_again_when_another_runs(desk):
    first = desk.submit()
    desk.begin()
    desk.warmd("pause", first)
    second = desk.submit()
    desk.begin()
    assert desk.warmd("pause").out == f"{second} pausing\n"


def test_prune_defaults_to_the_only_job_with_checkpoints(desk):
    assert desk.warmd("checkpoints", "prune").is_refusal(2)
    ids = [desk.submit(), desk.submit()]
    for job_id in ids:
        (desk.home.runs / job_id / "checkpoints" / "checkpoint-2").mkdir(parents=True)
    done = desk.warmd("checkpoints", "prune", "--yes")
    assert done.code == 2
    assert [line.split()[3] for line in done.err.splitlines()[:2]] == ids[::-1]
    (desk.home.runs / ids[0] / "checkpoints" / "checkpoint-2").rmdir()
    assert ids[1] in desk.warmd("checkpoints", "prune").err


@pytest.mark.parametrize("option", ["--timeout", "--in"])
def test_a_number_without_a_unit_queues_nothing(desk, option):
    done = desk.warmd(*desk.grpo, option, "8")
    assert done.is_refusal(2)
    assert f"Error: {option[2:]}: must have a unit, such as 90s, 15m or 1h30m, got '8'" in done.err
    assert desk.rows("jobs") == []


@pytest.mark.parametrize(
    "arguments", [("--timeout", "99999d"), ("--in", "99999d"), ("--retries", "9" * 30)]
)
def test_impossible_limits_are_refused(desk, arguments):
    assert desk.warmd(*desk.grpo, *arguments).is_refusal(2)
