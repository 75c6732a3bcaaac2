"""First-day use: suggestions for typos, tables that fit, reading without a daemon."""

from __future__ import annotations

import os
import pty
import sys
from typing import Any

import click
import psutil
import pytest
import yaml
from shell import warmd
from terminal import seen_on_a_terminal
from waiting import wait_until

from warmd.cli.view import render
from warmd.cli.view.describe import describe
from warmd.cli.view.progress import Progress
from warmd.daemon.runs.curves import Curve, smoothed, span_of
from warmd.daemon.runs.events import EventLog
from warmd.daemon.runs.rundir import RunDir
from warmd.jobs.grpo import completions
from warmd.jobs.grpo.completions import Completions

WIDTH = 80


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["ps"], "'warmd queue'"),
        (["ls"], "'warmd jobs'"),
        (["list"], "'warmd jobs'"),
        (["log"], "'warmd logs'"),
        (["statsu"], "'warmd status'"),
        (["submit", "grpo", "--lr", "1e-5"], "'--learning-rate'"),
        (["submit", "grpo", "--max_steps", "3"], "'--steps'"),
        (["submit", "grpo", "--use_peft"], "'--lora'"),
        (["submit", "grpo", "--num_generations", "3"], "'--num-generations'"),
        (["start", "--modle", "x"], "Did you mean '--model'"),
        (["chat", "--model", "x"], "It is an argument: warmd chat [MODEL]."),
    ],
)
def test_a_wrong_command_or_option_suggests_similar_ones(arguments, meant, tmp_path):
    done = warmd(*arguments, home=tmp_path)
    assert done.is_refusal(2)
    assert meant in done.err


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["checkpoints", "grpo-20260101-000000-aaaa"], ["checkpoints", "list"]),
        (["checkpoints", "-"], ["checkpoints", "list"]),
        (["checkpoints", "first"], ["checkpoints", "list"]),
        (["data", "/no/such/folder"], ["data", "show"]),
        (["data", "no:such"], ["data", "show"]),
    ],
)
def test_the_subcommand_that_shows_need_not_be_typed(arguments, meant, tmp_path):
    found = warmd(*arguments, home=tmp_path)
    assert found == warmd(*meant, *arguments[1:], home=tmp_path)
    assert "No such command" not in found.err


def test_a_misspelt_subcommand_is_none_of_its_arguments(tmp_path):
    assert "No such command 'lits'" in warmd("checkpoints", "lits", home=tmp_path).err


def test_a_command_without_a_similar_one_has_no_suggestion(tmp_path):
    assert "Did you mean" not in warmd("qqqqqq", home=tmp_path).err


def texts(value: str) -> list[str]:
    return [click.unstyle(line) for line in value.replace("\r", "").splitlines()]


@pytest.mark.slow
def test_jobs_of_long_names_and_long_errors_fit_80_columns(desk):
    for _ in range(2):
        desk.submit()
    desk.begin().fail("the reward of mine:score raised ZeroDivisionError at line 3 of rewards.py")
    lines = texts(seen_on_a_terminal("jobs", **desk.environ, COLUMNS=str(WIDTH)))
    assert max(map(len, lines)) <= WIDTH
    assert "ZeroDivisionError" in " ".join(lines)


def test_a_table_cuts_texts_before_numbers_and_ids_and_moves_the_last_column_below():
    headers = ["JOB", "MODEL", ">STEP", "ERROR"]
    job, model = "grpo-20261121-184200-x7f2", "grpo-20261120-090000-aaaa"
    row = [job, model, "1234/9999", "no memory for the weights of the model"]
    lines = [click.unstyle(line) for line in render.table(headers, [row], width=52)]
    assert lines == [
        "JOB                        MODEL                STEP",
        "grpo-20261121-184200-x7f2  grpo-20…0-aaaa  1234/9999",
        "  error: no memory for the weights of the model",
    ]


def test_fields_are_broken_between_words_and_phrases_stay_whole():
    text = ", ".join(map(render.phrase, ["uptime 2m 02s", "memory 12 MB", "pid 1234"]))
    assert render.wrapped(f"daemon  {text}", width=34, indent=8) == [
        "daemon  uptime 2m 02s,",
        "        memory 12 MB, pid 1234",
    ]


def answer(desk: Any, text: str) -> str:
    """A finished answer, with its events."""
    rundir = RunDir.create(desk.home.runs, "infer", {"spec": {"prompt": "1+1="}, "origin": "cli"})
    result = {"choices": [{"index": 0, "text": text, "finish_reason": "stop"}]}
    with EventLog(rundir.events, execution=1) as log:
        log.emit("started")
        log.emit("begin", prompt_tokens=4)
        for piece in text.split():
            log.emit("text", index=0, text=piece, tokens=1)
        log.emit("finished", result=result)
    rundir.write_result(result, revision=1)
    return rundir.path.name


def test_jobs_are_trainings_and_all_shows_answers_too(desk):
    training = desk.submit()
    other = answer(desk, "forty two")
    assert [job["id"] for job in desk.rows("jobs")] == [training]
    assert {job["id"] for job in desk.rows("jobs", "--all")} == {training, other}
    assert [job["id"] for job in desk.rows("jobs", "--kind", "infer")] == [other]


def test_statuses_have_synonyms(desk):
    desk.submit()
    running = desk.begin().id
    waiting = desk.submit()
    assert [job["id"] for job in desk.rows("jobs", "--status", "running")] == [running]
    assert [job["id"] for job in desk.rows("jobs", "--status", "waiting")] == [waiting]


def test_an_answer_is_shown_as_its_text(desk):
    job_id = answer(desk, "forty two")
    assert desk.warmd("result", job_id).out == "forty two\n"
    shown = desk.warmd("show", job_id).out.splitlines()
    assert ["answer", "forty", "two"] in [line.split() for line in shown]
    lines = desk.warmd("tail", job_id).out.splitlines()
    assert lines[-1] == "forty two"
    assert not [line for line in lines if "index" in line]


def test_jobs_can_be_read_while_no_daemon_runs(desk):
    finished, failed = desk.submit(), desk.submit()
    first = desk.begin()
    first.step(1)
    desk.client.rundir(finished).write_result({"steps": 4}, revision=1)
    first.finish({"steps": 4})
    desk.begin().fail("no memory")
    waiting = desk.submit()
    desk.client.close()
    desk.server.stop()
    try:
        assert {job["id"]: job["status"] for job in desk.rows("jobs")} == {
            finished: "finished",
            failed: "failed",
            waiting: "queued",
        }
        assert [job["id"] for job in desk.rows("jobs", "--limit", "1")] == [waiting]
        assert [job["id"] for job in desk.rows("queue")] == [waiting]
        assert desk.rows("show", failed)[0]["error"] == "no memory"
        assert desk.rows("result", finished) == [{"steps": 4}]
        assert desk.warmd("tail", finished).code == 0
        assert desk.warmd("tail", failed).code == 1
        done = desk.warmd("jobs")
        assert done.err.count("no daemon runs") == 1
        assert desk.warmd("cancel", waiting).is_refusal(3)
    finally:
        desk.server.start()


SAMPLE = {"prompt": "1+1=", "completion": "2", "rewards": {"math": 1.0}}


def test_completions_of_a_step_are_shown_with_their_rewards(desk):
    desk.submit()
    run = desk.begin()
    for step in (1, 2):
        sample = {**SAMPLE, "completion": f"answer {step}"}
        run.log.emit("step", step=step, steps_total=4, loss=0.5, samples=[sample])
    assert "answer 2" in desk.warmd("samples").out
    lines = desk.warmd("samples", run.id, "--step", "1").out.splitlines()
    assert lines == [
        f"{run.id}  step 1: 1 completion, mean reward 1",
        "",
        "prompt      1+1=",
        "step 1  reward 1",
        "            answer 1",
    ]
    assert desk.rows("samples", run.id, "--step", "2")[0]["rewards"] == {"math": 1.0}
    assert desk.warmd("samples", run.id, "--step", "3").is_refusal(2)
    run.finish({"steps": 2})
    assert "answer 1" not in desk.warmd("tail", run.id).out
    shown = desk.warmd("tail", run.id, "--samples").out
    assert "            answer 1" in shown
    assert "            answer 2" in shown


def test_kept_completions_are_whole_and_can_be_selected(desk):
    desk.submit()
    run = desk.begin()
    long = "First 7 * 8.\n" + "That is so. " * 60 + "\n#### 56"
    kept = Completions(run.rundir.path / completions.FILE, every=1, step=0)
    for step in (1, 2):
        rows = [
            {
                **{"row": row, "group": 0, "prompt": "7 * 8 = ", "completion": text},
                **{"answer": "56", "reward": reward, "rewards": {"math": reward, "form": 0.0}},
                **{"advantage": reward - 0.5, "tokens": 9, "stop": stop, "replayed": False},
            }
            for row, text, reward, stop in ((5, long, 1.0, "end"), (5, "\x1b[31m57", 0.0, "length"))
        ]
        kept.add(step, rows)
    kept.close()
    lines = desk.warmd("samples", run.id).out.splitlines()
    assert lines == [
        f"{run.id}  step 2: 2 completions, mean reward 0.5",
        "",
        "prompt      7 * 8 =",
        "answer      56",
        "step 2  reward 1 (math 1, form 0)  advantage 0.5  9 tokens",
        *(f"            {line.rstrip()}" for line in long.splitlines()),
        "step 2  reward 0 (math 0, form 0)  advantage -0.5  9 tokens, cut at the length",
        "            [31m57",
    ]
    found = desk.rows("samples", run.id, "--grep", "#### 56", "--best", "1")
    assert [(one["step"], one["completion"]) for one in found] == [(1, long)]
    assert len(desk.rows("samples", run.id, "--row", "5")) == 4
    assert "grep: no completion" in desk.warmd("samples", run.id, "--grep", "58").err
    refused = desk.warmd("samples", run.id, "--worst", "1", "--best", "1")
    assert refused.is_refusal(2)


def test_episodes_are_shown_turn_by_turn(desk):
    desk.submit()
    run = desk.begin()
    kept = Completions(run.rundir.path / completions.FILE, every=1, step=0)
    shared = {"group": 0, "prompt": "?=", "answer": None, "advantage": 0.5, "replayed": False}
    won = [
        {"role": "assistant", "content": "7", "reward": 0.0},
        {"role": "environment", "content": "low="},
        {"role": "assistant", "content": "8", "reward": 1.0},
    ]
    asked = [{"role": "assistant", "content": "f()"}, {"role": "tool", "content": "no\nway"}]
    rows = [
        {
            **{"row": row, "completion": "", "reward": reward, "rewards": {"environment": reward}},
            **{"tokens": 3, "stop": stop, "turns": turns, "success": success},
            **({"error": "RuntimeError: no more cards"} if reward is None else {}),
            **shared,
        }
        for row, reward, stop, turns, success in (
            (3, 1.0, "terminated", won, True),
            (4, None, "process_died", asked, None),
        )
    ]
    kept.add(1, rows)
    kept.close()
    assert desk.warmd("samples", run.id).out.splitlines() == [
        f"{run.id}  step 1: 2 episodes, mean reward 1",
        "",
        "prompt      ?=",
        "step 1  reward 1  advantage 0.5  3 tokens  terminated after 2 turns  success",
        "policy      7",
        "environment low=",
        "policy      8  reward 1",
        "step 1  no reward  advantage 0.5  3 tokens  process_died after 1 turn",
        "policy      f()",
        "tool        no",
        "            way",
        "            RuntimeError: no more cards",
    ]
    assert [one["row"] for one in desk.rows("samples", run.id, "--task", "3")] == [3]


def event(type: str, at: float, **fields: Any) -> dict[str, Any]:
    return {"seq": 1, "execution": 1, "time": at, "type": type, "step": None, **fields}


def test_the_live_line_of_a_file_of_prompts_has_rate_and_eta():
    progress = Progress()
    progress.update(event("started", 0.0))
    assert progress.line(3.0, 80) == "starting  3.0 s"
    progress.update(event("begin", 10.0, rows=200, done=0))
    for done, at in ((0, 10.0), (20, 12.0), (40, 14.0)):
        progress.update(event("progress", at, done=done, total=200))
    line = progress.line(14.0, 120)
    assert "40/200 records  ETA 16 s  done at " in line
    assert line.endswith("10 records/s")


def test_the_live_line_names_the_activity_before_the_steps_and_its_duration():
    progress = Progress()
    progress.update(event("started", 0.0))
    fields = {"activity": "tokenizing", "total": 734, "unit": "files"}
    progress.update(event("progress", 5.0, done=0, **fields))
    progress.update(event("progress", 7.0, done=367, **fields))
    bar = "█" * 10 + "░" * 10
    assert progress.line(8.0, 80) == f"{bar}  tokenizing  367/734 files  3.0 s"
    assert describe(event("progress", 0.0, done=367, **fields)).endswith(
        "tokenizing: 367/734 files"
    )
    begun = describe(event("progress", 0.0, done=0, **fields))
    assert begun.endswith("tokenizing: 734 files")
    progress.update(event("begin", 9.0, steps_total=80))
    assert progress.line(9.0, 80).endswith("0/80  starting")


def test_long_curves_are_smoothed_and_short_ones_and_evaluations_are_not():
    def curve(metric: str, count: int) -> Curve:
        return Curve(job="j", metric=metric, steps=range(count), values=[1.0] * count)

    assert [span_of(curve("reward", n)) for n in (39, 40, 400)] == [1, 5, 20]
    assert span_of(curve("eval_reward", 400)) == 1
    assert smoothed([3.0] * 9, 5) == pytest.approx([3.0] * 9)
    assert smoothed([1.0, 5.0], 1) == [1.0, 5.0]
    noisy = [0.0, 1.0] * 50
    assert max(smoothed(noisy, 10)[50:]) - min(smoothed(noisy, 10)[50:]) < 0.25


@pytest.mark.slow
def test_a_smoothed_curve_is_drawn_over_its_pale_raw_one(tmp_path):
    (tmp_path / "runs").mkdir()
    rundir = RunDir.create(tmp_path / "runs", "grpo", {"spec": {}})
    with EventLog(rundir.events, execution=1) as log:
        for step in range(1, 101):
            log.emit("step", step=step, steps_total=100, reward=float(step % 2))
    arguments = ("plot", "--metric", "reward")
    seen = seen_on_a_terminal(*arguments, WARMD_HOME=str(tmp_path))
    assert "(smoothed over 5 steps)" in seen
    assert "\x1b[36m\x1b[2m" in seen
    assert "\x1b[2m" not in seen_on_a_terminal(
        *arguments, "--smooth", "1", WARMD_HOME=str(tmp_path)
    )


def test_a_dry_run_shows_records_steps_time_memory_and_disk(desk):
    desk.submit()
    run = desk.begin()
    for step in (1, 2, 3):
        run.step(step)
    done = desk.warmd(*desk.grpo, "--dry-run")
    comments = [line for line in done.out.splitlines() if line.startswith("# ")]
    assert "# steps: 4" in comments
    assert any(line.startswith("# per step: 8 completions") for line in comments)
    assert any(line.startswith("# time: about ") and run.id in line for line in comments)
    assert set(yaml.safe_load(done.out)) == {"model", "samples"}


def test_chat_with_a_model_without_template_names_models_that_can_chat(desk, tmp_path):
    able = tmp_path / "able"
    able.mkdir()
    (able / "config.json").write_text('{"max_position_embeddings": 256}')
    (able / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (desk.home.path / "config.yaml").write_text(f"models: [able={able}]\n")
    done = desk.warmd("chat", desk.grpo[3])
    assert done.is_refusal(2)
    assert "must go with a chat template" in done.err
    assert "chat with able instead" in done.err
    assert "warmd run --model" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("leave", ["/bye\n", "\x04", "\x03"], ids=["bye", "ctrl-d", "ctrl-c"])
def test_chat_shows_how_to_leave_and_ends_on_each_way(desk, tmp_path, leave):
    able = tmp_path / "able"
    able.mkdir()
    (able / "config.json").write_text('{"max_position_embeddings": 256}')
    (able / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    pid, terminal = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "warmd.cli", "chat", str(able)]
        os.execve(sys.executable, command, desk.environ)
    seen = b""
    while b"> " not in seen:
        seen += os.read(terminal, 4096)
    assert b"/bye" in seen
    # It waits for a key: a Ctrl-C just before that is seen only at the next key.
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_SLEEPING)
    os.write(terminal, leave.encode())
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)


@pytest.mark.slow
def test_several_models_are_loaded_by_one_command(shared_daemon, tiny_model):
    home = shared_daemon.home.path
    done = warmd("load", "--json", f"one={tiny_model}", f"other={tiny_model}", home=home)
    try:
        assert [model["name"] for model in done.objects] == ["one", "other"]
    finally:
        for name in ("one", "other"):
            assert warmd("models", "--unload", name, home=home).code == 0
