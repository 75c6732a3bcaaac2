"""The reward process, and the reward log."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
from grpo_jobs import spec

from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.reward_log import RewardLog

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def trained(folder: Path, **options: Any) -> tiny.Surroundings:
    job = tiny.surroundings(folder)
    run(spec(**options), job.ctx)
    return job


def outcomes(job: tiny.Surroundings) -> list[tuple[Any, ...]]:
    return [(s["loss"], s["grad_norm"], s["rewards"]) for s in job.of_type("step")]


# The process.


@pytest.mark.slow
def test_rewards_in_the_reward_process_train_as_in_the_process_of_the_job(tmp_path, monkeypatch):
    async def slowly(completions: list[str], answer: list[str], log_metric: Any, **_: Any) -> Any:
        await asyncio.sleep(0)
        log_metric("seen", len(completions))
        return [None if i == 1 else len(text) / 10 for i, text in enumerate(completions)]

    monkeypatch.setattr(tiny, "slowly", slowly, raising=False)
    options = {"reward": ["tiny:digit_share", "tiny:slowly=0.5"], "eval_samples": 3}
    usual = trained(tmp_path / "usual", **options)
    apart = trained(tmp_path / "apart", reward_timeout=30, **options)
    assert outcomes(apart) == outcomes(usual)
    assert [step["left_out"] for step in apart.of_type("step")] == [0] * 6
    assert [e["reward"] for e in apart.of_type("eval")] == [
        e["reward"] for e in usual.of_type("eval")
    ]


def hangs_at(step: int) -> Any:
    def reward(prompts: list[str], completions: list[str], trainer_state: Any, **_: Any) -> Any:
        if trainer_state.global_step == step - 1:
            time.sleep(60)  # longer than `reward_timeout`: its process is killed
        return tiny.digit_share(prompts, completions, [])

    return reward


def raises_at(step: int) -> Any:
    def reward(prompts: list[str], completions: list[str], trainer_state: Any, **_: Any) -> Any:
        if trainer_state.global_step == step - 1:
            raise ValueError("out of luck")
        return tiny.digit_share(prompts, completions, [])

    return reward


def dies_at(step: int) -> Any:
    def reward(prompts: list[str], completions: list[str], trainer_state: Any, **_: Any) -> Any:
        if trainer_state.global_step == step - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return tiny.digit_share(prompts, completions, [])

    return reward


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        pytest.param(
            hangs_at(3), "took longer than 0.5 s (reward_timeout)", marks=pytest.mark.slow
        ),
        (raises_at(3), "reward tiny:faulty failed at"),
        pytest.param(dies_at(3), "the reward process ended", marks=pytest.mark.slow),
    ],
)
def test_a_group_whose_rewards_fail_is_left_out_and_the_job_continues(
    tmp_path, monkeypatch, reward, message
):
    monkeypatch.setattr(tiny, "faulty", reward, raising=False)
    job = trained(tmp_path, reward=["tiny:faulty"], reward_timeout=0.5)
    [failure] = job.of_type("reward_failed")
    assert failure["step"] == 3
    assert failure["row"] > 0
    assert message in failure["message"]
    steps = job.of_type("step")
    assert [step["left_out"] for step in steps] == [0, 0, 1, 0, 0, 0]
    assert [step["grad_norm"] == 0 for step in steps] == [False, False, True, False, False, False]


@pytest.mark.slow
def test_held_out_completions_have_the_time_limit_of_groups(tmp_path, monkeypatch):
    calls = tmp_path / "calls"

    def slow(completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        with open(calls, "a") as file:
            file.write(f"{len(completions)}\n")
        if trainer_state.global_step == 1 and len(completions) == 2:  # the last held-out ones
            raise ValueError("out of luck")
        return tiny.digit_share([], completions, [])

    monkeypatch.setattr(tiny, "slow", slow, raising=False)
    job = trained(
        tmp_path / "run", reward=["tiny:slow"], reward_timeout=30, steps=1, eval_samples=6
    )
    assert calls.read_text().split() == ["4", "2", "4", "4", "2"]
    [failure] = job.of_type("reward_failed")
    assert failure["step"] == 1  # the one that was evaluated, not the next
    assert [event.get("unscored", 0) for event in job.of_type("eval")] == [0, 2]


@pytest.mark.slow
def test_a_metric_without_a_number_comes_back_from_the_reward_process(tmp_path, monkeypatch):
    def unknown(completions: list[str], log_metric: Any, **_: Any) -> list[float]:
        log_metric("unknown", float("nan"))
        return tiny.digit_share([], completions, [])

    monkeypatch.setattr(tiny, "unknown", unknown, raising=False)
    options = {"reward": ["tiny:unknown"], "steps": 2}
    apart = trained(tmp_path / "apart", reward_timeout=30, **options)
    assert outcomes(apart) == outcomes(trained(tmp_path / "usual", **options))
    assert not apart.of_type("reward_failed")


def test_without_the_process_that_forks_the_rewards_the_job_fails_in_one_line(
    tmp_path, monkeypatch
):
    def dies_with_its_parent(completions: list[str], **_: Any) -> list[float]:
        for pid in (os.getppid(), os.getpid()):
            os.kill(pid, signal.SIGKILL)
        return []

    monkeypatch.setattr(tiny, "dies", dies_with_its_parent, raising=False)
    with pytest.raises(JobFailed, match=r"^reward: the process that forks the reward process has"):
        trained(tmp_path, reward=["tiny:dies"], reward_timeout=30)


def test_a_stop_request_to_all_processes_leaves_no_group_out(tmp_path, monkeypatch):
    def stopped_with_the_job(completions: list[str], **_: Any) -> list[float]:
        for pid in (os.getppid(), os.getpid()):
            os.kill(pid, signal.SIGTERM)
        # What it starts can still be terminated.
        with multiprocessing.get_context("fork").Pool(1) as pool:
            lengths = pool.map(len, completions)
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        assert program.wait(10) == -signal.SIGTERM
        return [length / 10 for length in lengths]

    monkeypatch.setattr(tiny, "stopped_with_the_job", stopped_with_the_job, raising=False)
    job = trained(tmp_path, reward=["tiny:stopped_with_the_job"], reward_timeout=30, samples=2)
    assert [step["left_out"] for step in job.of_type("step")] == [0, 0]
    assert job.of_type("reward_failed") == []


@pytest.mark.slow
def test_the_other_group_of_a_step_is_learned_from(tmp_path, monkeypatch):
    def first_row_fails(prompts: list[str], completions: list[str], answers: list[str]) -> Any:
        assert prompts[0] != first
        return tiny.digit_share(prompts, completions, [])

    monkeypatch.setattr(tiny, "faulty", first_row_fails, raising=False)
    first = spec().parts.training[0].prompt
    options = {"reward": ["tiny:faulty", "general"], "prompts_per_step": 6, "epochs": 2}
    job = trained(tmp_path, reward_timeout=30, **options)
    for step in job.of_type("step"):
        assert step["left_out"] == 1
        assert step["grad_norm"] > 0


@pytest.mark.slow
def test_rewards_that_only_fail_end_the_job(tmp_path, monkeypatch):
    def broken(prompts: list[str], completions: list[str], answers: list[str]) -> Any:
        raise ValueError("out of luck")

    monkeypatch.setattr(tiny, "faulty", broken, raising=False)
    with pytest.raises(JobFailed) as caught:
        trained(tmp_path, reward=["tiny:faulty"], reward_timeout=30, samples=20)
    assert str(caught.value).startswith(
        "reward: must succeed for one of 10 consecutive groups, got none; the last one: reward "
        "tiny:faulty failed at "
    )


def test_no_reward_process_is_left_behind(tmp_path, monkeypatch):
    def note(prompts: list[str], completions: list[str], answers: list[str]) -> Any:
        (tmp_path / "pids").write_text(f"{os.getpid()} {os.getppid()}")
        return tiny.digit_share(prompts, completions, [])

    monkeypatch.setattr(tiny, "digit_share_noted", note, raising=False)
    monkeypatch.setattr(tiny, "kept", tiny.digit_share, raising=False)
    trained(tmp_path / "run", reward=["tiny:digit_share_noted"], reward_timeout=30, steps=1)
    worker, keeper = map(int, (tmp_path / "pids").read_text().split())
    assert os.getpid() not in (worker, keeper)
    for pid in (worker, keeper):
        assert not Path(f"/proc/{pid}").exists()


# The log of a job of an earlier version.


def lines(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


LATER = pytest.mark.nightly(
    part="episodes", catches="rewards that a resume from a checkpoint logs twice"
)


@pytest.mark.slow
@pytest.mark.parametrize("stopped_at", [2, pytest.param(5, marks=LATER)])
def test_after_a_resume_the_log_has_each_step_once(tmp_path, stopped_at):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "rewards.jsonl"
    trained(tmp_path / "whole", reward_log=str(whole))
    first = tiny.surroundings(tmp_path / "run")
    first.raise_at_step[stopped_at] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(spec(reward_log=str(path)), first.ctx)
    assert lines(path)[-1]["step"] == stopped_at
    with open(path, "ab") as file:
        file.write(lines_of_a_torn_write(path))
    trained(tmp_path / "run", reward_log=str(path))
    assert path.read_bytes() == whole.read_bytes()


def lines_of_a_torn_write(path: Path) -> bytes:
    return path.read_bytes().splitlines()[-1][:30]


@pytest.mark.slow
def test_a_log_keeps_the_steps_before_a_stop(tmp_path):
    path = tmp_path / "rewards.jsonl"
    first = tiny.surroundings(tmp_path / "run")
    first.stop_at_step = 2
    with pytest.raises(Stopped):
        run(spec(reward_log=str(path)), first.ctx)
    kept = path.read_bytes()
    trained(tmp_path / "run", reward_log=str(path))
    assert path.read_bytes().startswith(kept)
    assert [line["step"] for line in lines(path)] == [s for s in range(1, 7) for _ in range(4)]


@pytest.mark.parametrize("left", [b'{"job":"gr', b"\0" * 5000, b"\0" * 4096 + b'": 3}\n'])
@pytest.mark.parametrize("whole_lines", [0, 2])
def test_what_a_power_failure_leaves_of_a_line_is_removed(tmp_path, whole_lines, left):
    path = tmp_path / "log.jsonl"
    with RewardLog(path, "grpo-1", step=0) as log:
        for step in range(1, whole_lines + 1):
            log.add(step, [{"row": 2, "completion": "a", "rewards": {}}])
    kept = path.read_bytes()
    path.write_bytes(kept + left)
    if left.strip(b"\0") and left.startswith(b"\0") and not kept:
        with pytest.raises(JobFailed, match="which has other content"):  # it may be another file
            RewardLog(path, "grpo-1", step=whole_lines)
    else:
        RewardLog(path, "grpo-1", step=whole_lines).close()
        assert path.read_bytes() == kept


def test_a_text_that_is_not_unicode_is_logged_as_in_events(tmp_path):
    with RewardLog(tmp_path / "log.jsonl", "job", step=0) as log:
        log.add(1, [{"row": 2, "completion": "a\ud800b", "rewards": {"r": float("nan")}}])
    [line] = lines(log.path)
    assert line == {
        **{"job": "job", "step": 1, "row": 2},
        **{"completion": "a?b", "rewards": {"r": None}},
    }


def test_a_file_with_other_content_is_never_truncated(tmp_path):
    path = tmp_path / "precious.jsonl"
    path.write_text('{"step": 1}\n')
    with pytest.raises(JobFailed, match=r"^reward_log: must be a new file, got .*other content$"):
        trained(tmp_path / "run", reward_log=str(path))
    assert path.read_text() == '{"step": 1}\n'


def test_a_full_disk_leaves_whole_steps_in_the_log_and_is_reported(tmp_path, monkeypatch):
    path = tmp_path / "rewards.jsonl"
    write, room = os.write, 700

    def until_full(file: int, content: bytes) -> int:
        if os.path.samestat(os.fstat(file), path.stat()):
            left = room - path.stat().st_size
            if left <= 0:
                raise OSError(28, "No space left on device")
            return write(file, content[:left])
        return write(file, content)

    path.touch()
    monkeypatch.setattr("warmd.jobs.files.appending.os.write", until_full)
    job = trained(tmp_path / "run", reward_log=str(path))
    logged = [line["step"] for line in lines(path)]
    assert logged
    assert all(logged.count(step) == 4 for step in logged)
    assert any("reward_log: lacks step" in event["message"] for event in job.of_type("warning"))
    assert len(job.of_type("step")) == 6


def test_the_option_of_earlier_versions_is_refused_with_what_replaces_it(tmp_path):
    with pytest.raises(
        SpecError, match=r"^reward_log: is no longer an option: .* `warmd samples JOB --json`"
    ):
        spec(reward_log="new.jsonl").located(tmp_path).check_inputs(None)
