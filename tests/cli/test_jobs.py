"""The commands that show, follow and steer jobs, with a real Redis.

The test acts as the worker, through the daemon's own job store and event log: these tests are about
the output of the command line.
"""

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import orjson
import pytest
from breadth import mostly_slow
from terminal import seen_on_a_terminal
from waiting import wait_until
from worked_sweeps import planned

from warmd.cli.commands import watch
from warmd.cli.view.progress import Progress
from warmd.daemon.runs import events

COMMAND = [sys.executable, "-m", "warmd.cli"]


def test_submit_prints_only_the_job_id_and_queue_shows_its_position(desk):
    first, second = desk.submit(), desk.submit()
    front = desk.submit("--front")
    later = desk.submit("--in", "1h")
    behind = desk.submit("--after", first)
    queue = desk.rows("queue")
    assert [job["id"] for job in queue] == [front, first, second, later, behind]
    assert [job["position"] for job in queue] == [1, 2, 3, None, None]
    assert queue[4]["after"] == [first]
    text = desk.warmd("queue").out.splitlines()
    assert text[0].split()[:3] == ["POS", "JOB", "QUEUE"]
    assert [line.split()[1] for line in text[1:]] == [job["id"] for job in queue]
    assert text[5].endswith(first)


@pytest.mark.slow
def test_a_waiting_job_shows_how_many_steps_it_will_take(desk):
    job_id = desk.submit()
    assert [job["steps_total"] for job in desk.rows("queue")] == [4]
    assert "  0/4  " in desk.warmd("queue").out
    desk.warmd("cancel", job_id)
    desk.warmd("resume", job_id, "--steps", "9")
    assert desk.rows("show", job_id)[0]["steps_total"] == 9


@pytest.mark.slow
def test_queue_and_tail_give_the_same_eta_with_the_evaluations_to_come(desk):
    job_id = desk.submit()
    run = desk.begin()
    run.step(1)
    run.log.emit("eval", step=1, seconds=100.0)
    run.step(2)
    tail = Progress()
    for event in events.read(desk.client.rundir(job_id).events):
        tail.update(event)
    (row,) = desk.rows("queue")
    assert row["eta_s"] == pytest.approx(tail.eta_s(time.time()), abs=1)
    assert row["eta_s"] == pytest.approx(200, abs=2)


def test_jobs_are_listed_newest_first_and_can_be_filtered(desk):
    first, second = desk.submit(), desk.submit()
    run = desk.begin()
    run.fail("loss is nan\nat step 3")
    assert [job["id"] for job in desk.rows("jobs")] == [second, first]
    assert [job["id"] for job in desk.rows("jobs", "--limit", "1")] == [second]
    assert [job["id"] for job in desk.rows("jobs", "--status", "failed")] == [first]
    lines = desk.warmd("jobs").out.splitlines()
    assert lines[2].endswith("loss is nan at step 3")


def test_show_takes_an_id_a_prefix_or_nothing_for_the_latest(desk):
    first, latest = sorted([desk.submit(), desk.submit()])
    for arguments in ([latest], [], ["-"], [latest[:-2]]):
        [shown] = desk.rows("show", *arguments)
        assert shown["id"] == latest
    assert {"kind", "status", "step", "steps_total", "execution", "run_dir", "error", "result"} <= (
        shown.keys()
    )
    assert f"run_dir       {desk.home.runs / first}\n" in desk.warmd("show", first).out


def test_show_of_a_training_has_its_evaluations_and_how_to_use_it(desk):
    job_id, run = desk.submit(), desk.begin()
    trained = desk.client.rundir(job_id).path / "model"
    shutil.copytree(desk.model, trained)
    evaluations = {"eval_before": {"loss": 2.5, "n": 9}, "eval_after": {"loss": 1.25, "n": 9}}
    run.log.emit("begin", learning_rate=0.0003, batch_size=2, first_prompt="1 +\n")
    run.finish({"steps": 4, **evaluations})
    lines = [" ".join(line.split()) for line in desk.warmd("show", job_id).out.splitlines()]
    assert {
        "evaluated before loss 2.5, n 9",
        "after loss 1.25, n 9",
        f"trained {trained}",
        "in effect learning_rate 0.0003, batch_size 2",
        r'first prompt "1 +\n"',
    } <= set(lines)
    (use,) = [line for line in lines if line.startswith("use ")]
    assert f"warmd run --model {job_id} PROMPT" in use
    again = desk.warmd("resume", job_id)
    assert (again.code, again.out) == (0, f"{job_id} finished\n")
    assert f"train for more steps with: warmd resume {job_id} --steps N" in again.err


def test_tail_of_a_sweep_refuses_what_only_a_job_has(desk):
    sweep_id = planned(desk, sweep={"learning_rate": ["1e-3", "1e-2"]})
    for option in (["--samples"], ["-n", "3"]):
        done = desk.warmd("tail", sweep_id, *option)
        assert done.is_refusal(2)
        assert "must go with a job, got a sweep" in done.err


@pytest.mark.parametrize(
    "command",
    mostly_slow(["show", "tail", "result", "cancel", "resume", "logs"], but=["show", "resume"]),
)
def test_an_id_of_no_job_or_of_several_is_one_line_and_exits_with_2(desk, command):
    for name in ("grpo-20261121-184200-aaaa", "grpo-20261121-184200-bbbb"):
        (desk.home.runs / name).mkdir()
    for job in ("../../x", "grpo-20200101-000000-aaaa", "grpo", "\n", "x" * 999):
        done = desk.warmd(command, job)
        assert done.is_refusal(2)
        assert done.err.startswith("Error: job: ")


@pytest.mark.slow
def test_tail_shows_a_job_from_its_first_event_to_its_end_and_exits_with_0(desk):
    desk.submit()
    run = desk.begin()
    run.step(1)
    with subprocess.Popen(
        [*COMMAND, "tail", "--json"], env=desk.environ, stdout=subprocess.PIPE
    ) as tail:
        assert tail.stdout is not None
        events = [orjson.loads(tail.stdout.readline()) for _ in range(3)]
        run.step(2)
        events.append(orjson.loads(tail.stdout.readline()))
        run.finish({"steps": 2})
        events += map(orjson.loads, tail.stdout)
        assert tail.wait(timeout=10) == 0
    assert [event["type"] for event in events] == ["started", "begin", "step", "step", "finished"]
    assert [event["seq"] for event in events] == [1, 2, 3, 4, 5]
    assert all({"execution", "time", "step"} <= event.keys() for event in events)
    lines = desk.warmd("tail", run.id).out.splitlines()
    assert "step 1/4  loss 1  reward 0.5" in lines[2]
    assert lines[4].endswith("finished at step 2  steps 2")
    for number in (0, 2, 9):
        newest = desk.warmd("tail", run.id, "-n", str(number))
        assert newest.out.splitlines() == lines[len(lines) - min(number, 5) :]
        assert newest.code == 0
    assert desk.warmd("tail", run.id, "-n", "-1").is_refusal(2)


def test_tail_exits_with_1_for_a_failed_job_and_4_for_a_stopped_or_canceled_one(desk):
    for _ in range(3):
        desk.submit()
    failed, stopped = desk.begin(), desk.begin()
    failed.fail("loss is nan")
    stopped.stop()
    done = desk.warmd("tail", failed.id)
    assert done.code == 1
    assert done.out.splitlines()[-1].endswith("failed  error loss is nan")
    assert desk.warmd("tail", stopped.id).code == 4
    canceled = desk.rows("jobs", "--status", "queued")[0]["id"]
    desk.warmd("cancel", canceled)
    assert desk.warmd("tail", canceled).code == 4


@pytest.mark.slow
def test_submit_wait_prints_the_id_follows_on_stderr_and_exits_by_the_jobs_end(desk):
    command = [*COMMAND, *desk.grpo, "--wait"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=desk.environ, **pipes) as waiting:
        run = desk.begin()
        run.step(1)
        run.fail("no memory")
        out, err = waiting.communicate(timeout=20)
    assert (waiting.returncode, out) == (1, run.id + "\n")
    assert "step 1/4" in err
    assert "no memory" in err


@pytest.mark.slow
def test_on_a_terminal_steps_are_one_live_line_and_ctrl_c_leaves_the_job_running(desk):
    desk.submit()
    run = desk.begin()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [*COMMAND, "tail"], desk.environ)
    seen = ""

    def see(text: str) -> None:
        nonlocal seen
        while text not in seen:
            seen += os.read(terminal, 4096).decode()

    run.step(1)
    see("1/4")
    run.step(2)
    see("2/4")
    see("ETA")
    assert "step 1/4" not in seen
    os.write(terminal, b"\x03")
    see(f"warmd tail {run.id}")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 130
    os.close(terminal)
    assert desk.client.jobs.get(run.id)["status"] == "started"


@pytest.mark.slow
def test_ctrl_c_on_a_pipe_shows_how_to_follow_again(desk):
    job_id = desk.submit()
    desk.begin()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*COMMAND, "tail"], env=desk.environ, **pipes) as tail:
        assert tail.stdout is not None
        tail.stdout.readline()
        tail.send_signal(signal.SIGINT)
        _, err = tail.communicate(timeout=10)
    assert tail.returncode == 130
    assert err.strip() == f"{job_id} continues. Follow it again with: warmd tail {job_id}"


def test_a_result_is_printed_once_there_is_one(desk):
    job_id = desk.submit()
    done = desk.warmd("result")
    assert (done.code, done.out) == (2, "")
    assert f"warmd tail {job_id}" in done.err
    result = {"steps": 4, "eval_after": {"loss": 0.5}, "metrics": {"loss": 0.12345, "reward": 0.5}}
    desk.begin().finish(result)
    assert desk.rows("result") == [result]
    assert desk.warmd("result").out.splitlines() == [
        "steps            4",
        "eval_after.loss  0.5",
        "last step        loss 0.1235, reward 0.5",
    ]


@pytest.mark.slow
def test_the_result_of_a_failed_job_exits_with_1_and_of_a_stopped_one_with_4(desk):
    failed = desk.submit()
    desk.begin().fail("no memory")
    done = desk.warmd("result", failed)
    assert (done.code, "no memory" in done.err) == (1, True)
    job_id = desk.submit()
    desk.begin().stop()
    done = desk.warmd("result", job_id)
    assert done.code == 4
    assert f"warmd resume {job_id}" in done.err


def test_a_waiting_job_is_canceled_at_once_and_can_be_resumed(desk):
    job_id = desk.submit()
    assert desk.rows("cancel") == [{"id": job_id, "outcome": "canceled"}]
    assert desk.rows("queue") == []
    again = desk.warmd("cancel")
    assert again.code == 2
    assert again.err.count("\n") == 1
    assert desk.warmd("resume", "--steps", "9").out == f"{job_id} queued\n"
    assert [job["id"] for job in desk.rows("queue")] == [job_id]


def test_cancel_requests_a_stop_and_ends_a_running_job_with_now(desk):
    desk.submit()
    desk.begin()
    assert desk.rows("cancel")[0]["outcome"] == "stopping"
    assert desk.rows("cancel", "--now")[0]["outcome"] == "killing"


@pytest.mark.slow
def test_output_is_colored_on_terminals_only_and_not_with_no_color(desk):
    desk.submit()
    assert "\x1b" not in desk.warmd("jobs").out

    assert "\x1b[1m" in seen_on_a_terminal("jobs", **desk.environ)
    assert "\x1b" not in seen_on_a_terminal("jobs", **desk.environ, NO_COLOR="1")


@pytest.mark.slow
def test_the_duration_of_a_pause_starts_with_the_pause(desk):
    job_id = desk.submit()
    created = desk.rows("show", job_id)[0]["created_at"]
    wait_until(lambda: time.time() > created + 0.1, timeout_s=10)
    desk.warmd("pause", job_id)
    (job,) = desk.rows("show", job_id)
    assert created + 0.1 < job["paused_at"] <= time.time()
    a_minute_ago = {**job, "paused_at": time.time() - 65}
    assert watch.waiting_line(a_minute_ago, now=time.time()).startswith("paused for 1m 05s")
    of_an_earlier_version = {**job, "paused_at": None}
    assert watch.waiting_line(of_an_earlier_version, now=time.time()).startswith("paused, ")
    desk.warmd("resume", job_id)
    assert desk.rows("show", job_id)[0]["paused_at"] is None


@pytest.mark.parametrize(
    "command",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("queue", "jobs", "tail", "result")),
        "show",
    ],
)
def test_a_command_that_reads_imports_nothing_that_submits(desk, tmp_path, command):
    job_id = desk.train()
    words = [command] if command in ("queue", "jobs") else [command, job_id]
    code = (
        "import sys; from warmd.cli.main import main; code = main(sys.argv[2:]);"
        "print(code, *sys.modules, file=open(sys.argv[1], 'w'))"
    )
    found = tmp_path / "found"
    subprocess.run([sys.executable, "-c", code, found, *words], env=desk.environ, check=True)
    exit_code, *modules = found.read_text().split()
    assert exit_code == "0"
    assert "warmd.daemon.client.jobs" in modules
    unused = {
        *("numpy", "torch", "warmd.daemon.client.checking", "warmd.daemon.lifecycle.submit"),
        *("warmd.daemon.lifecycle.adopt", "warmd.daemon.groups.driver"),
        *("warmd.daemon.store.remote", "warmd.jobs.bench.floor"),
    }
    assert unused & set(modules) == set()
