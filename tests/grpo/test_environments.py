"""GRPO on episodes in environments: the same bits whatever ends first, and no episode twice."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
import tiny
from engines import make
from grpo_jobs import rows, same_weights, steps, weights
from safetensors.torch import load_file
from tool_chats import source_of, tokenizer
from waiting import wait_until

from warmd.jobs.environments.journal import FOLDER, EpisodeJournal
from warmd.jobs.environments.pool import Limits
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

GAMES = str(Path(__file__).parents[1] / "environments")
TIMES = {"environment_s", "waited_s"}


def spec(**options: Any) -> GrpoSpec:
    """A job of 6 steps of a tiny model, each of 2 groups of 4 episodes of 3 turns."""
    small = {
        "environment": "games:Digits",
        "samples": 12,
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_turn_length": 6,
        "stop": list("abcdefghijklmnopqrstuvwxyz "),  # a random model ends most of its turns
        "learning_rate": 1e-2,
        "save_every": 3,
        "keep": 100,
    }
    return GrpoSpec.parse(small | options)


def trained(job: GrpoSpec, folder: Path) -> tiny.Surroundings:
    """Run a job in a folder, with what it has there."""
    made = tiny.surroundings(folder)
    run(job, replace(made.ctx, code_folders=(GAMES,)))
    return made


def measured(made: tiny.Surroundings) -> dict[int, dict[str, Any]]:
    """The step events, without what depends on the clock."""
    found = steps(made.events)
    return {step: {k: v for k, v in one.items() if k not in TIMES} for step, one in found.items()}


def kept(folder: Path) -> list[dict[str, Any]]:
    """The lines of completions.jsonl."""
    return [orjson.loads(line) for line in (folder / "completions.jsonl").read_bytes().splitlines()]


@pytest.mark.slow
def test_a_step_learns_from_episodes_and_shows_them(tmp_path):
    made = trained(spec(), tmp_path / "run")
    (begin,) = made.of_type("begin")
    assert begin["environment"] == "games:Digits"
    assert (begin["tasks"], begin["concurrency"]) == (12, 8)
    found = measured(made)
    assert len(found) == 6
    assert all(one["episodes"] == 8 and 1.5 <= one["turns"] <= 3 for one in found.values())
    assert any(one["reward_std"] > 0 and one["grad_norm"] > 0 for one in found.values())
    assert all(set(one["ends"]) <= {"terminated", "length"} for one in found.values())
    shown = kept(tmp_path / "run")
    assert len(shown) == 6 * 8
    assert all(one["prompt"].endswith("?") for one in shown)
    assert any("[" in one["completion"] for one in shown)  # what the environment has answered
    turns = next(one["turns"] for one in shown if len(one["turns"]) == 5)
    assert [one["role"] for one in turns] == ["assistant", "environment"] * 2 + ["assistant"]
    assert all(0 <= one["reward"] < 1 for one in turns[::2])
    assert not (tmp_path / "run" / FOLDER).exists()  # checkpoints cover all steps


OTHER_OPTIONS = pytest.mark.nightly(
    part="episodes", catches="an option with which concurrent episodes change each other's results"
)
AT_ONCE = [pytest.param(n, {}, marks=OTHER_OPTIONS) for n in (1, 8)]
AT_ONCE += [
    pytest.param(3, more, marks=OTHER_OPTIONS)
    for more in ({"rollout_dtype": "int8"}, {"lora": 2, "base_precision": "int8"}, {"lora": 2})
]


@pytest.mark.slow
@pytest.mark.parametrize(("concurrency", "more"), [(3, {}), *AT_ONCE])
def test_the_same_bits_however_many_episodes_are_played_at_once(tmp_path, concurrency, more):
    wanted = trained(spec(**more), tmp_path / "wanted")
    slow = spec(environment="games:SlowDigits", concurrency=concurrency, **more)
    found = trained(slow, tmp_path / "found")
    assert measured(found) == measured(wanted)
    (file,) = (path.name for path in (tmp_path / "found/model").glob("*.safetensors"))
    ours, theirs = (load_file(tmp_path / name / "model" / file) for name in ("found", "wanted"))
    assert same_weights(ours, theirs)


OTHER_MODELS = pytest.mark.nightly(
    part="episodes",
    catches="an option with which an episode of one turn learns differently than a completion",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        {},
        pytest.param({"lora": 2}, marks=OTHER_MODELS),
        pytest.param({"lora": 2, "base_precision": "int8"}, marks=OTHER_MODELS),
        pytest.param({"rollout_dtype": "int8"}, marks=OTHER_MODELS),
        pytest.param({"replay": 2, "beta": 0.1}, marks=OTHER_MODELS),
    ],
)
def test_an_episode_of_one_turn_learns_as_a_completion(tmp_path, monkeypatch, model):
    dataset = rows(tmp_path / "tasks.jsonl", *[{"prompt": f"{n}+1="} for n in range(12)])
    same = {"dataset": dataset, "max_completion_length": 50, "stop": [], **model}
    played = trained(
        spec(environment="games:OneTurn", **same | {"max_turn_length": 50}), tmp_path / "played"
    )
    alone = {
        "environment": None,
        "max_turn_length": None,
        "reward": ["games:ended_digits"],
    }
    monkeypatch.syspath_prepend(GAMES)
    written = trained(spec(**same, **alone), tmp_path / "written")
    shown = [steps(one.events) for one in (played, written)]
    names = ("reward", "reward_std", "loss", "grad_norm", "entropy", "clipped", "completion_length")
    assert any(one["grad_norm"] > 0 for one in shown[0].values())
    for name in names:
        found, wanted = ([one[name] for one in of.values()] for of in shown)
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6), name
    texts = [[one["completion"] for one in kept(tmp_path / name)] for name in ("played", "written")]
    assert texts[0] == texts[1]


class PowerCut(BaseException):
    """Ends a run like a power failure: nothing more is written."""


# Dynamic sampling and replay: a step takes a task several times, and the buffer has successes.
TAKEN_AGAIN = {"environment": "games:RareDigits", "samples": 4, "steps": 6}
TAKEN_AGAIN |= {"resample": 2, "replay": 2}
MOMENTS = pytest.mark.nightly(
    part="episodes", catches="a moment of a step at which a kill loses or repeats an episode"
)
KILLED = [(5, {}), (30, {}), (60, TAKEN_AGAIN)]
KILLED += [(ended, {}) for ended in (0, 1, 7, 8, 24, 45)]
KILLED += [(ended, TAKEN_AGAIN) for ended in (9, 20, 50)]


def counted(file: Path, more: dict[str, Any]) -> GrpoSpec:
    """A job that writes to `file` which episodes are over."""
    file.touch()
    tasks = [{"file": str(file)}] * 12
    options = {"environment": "games:CountedDigits", "max_completion_length": 1000, **more}
    return spec(dataset=rows(file.with_suffix(".jsonl"), *tasks), **options)


_wholes: dict[str, tuple[Path, tiny.Surroundings]] = {}


@pytest.fixture
def whole(more: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file and the job of `more` that is not killed, trained once."""
    if str(more) not in _wholes:
        folder = tmp_path_factory.mktemp("whole")
        file = folder / "whole.txt"
        _wholes[str(more)] = file, trained(counted(file, more), folder / "run")
    return _wholes[str(more)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ended", "more"),
    [pytest.param(*one, marks=() if one[0] == 30 else MOMENTS) for one in KILLED],
)
def test_after_a_kill_no_episode_that_was_over_is_played_again(
    tmp_path, whole, monkeypatch, ended, more
):
    file, undisturbed = whole
    add = EpisodeJournal.add
    written: list[str] = []

    def cut(journal: EpisodeJournal, episode: Any) -> None:
        if len(written) == ended:
            raise PowerCut
        written.append(episode.reason)
        add(journal, episode)

    monkeypatch.setattr(EpisodeJournal, "add", cut)
    died = counted(tmp_path / "died.txt", more)
    with pytest.raises(PowerCut):
        trained(died, tmp_path / "died")
    before = (tmp_path / "died.txt").read_text().count("over")
    monkeypatch.setattr(EpisodeJournal, "add", add)
    again = trained(died, tmp_path / "died")
    resumed = again.of_type("begin")[0]["resumed_from"] or 0
    assert resumed in ((0, 3) if more else (3,) if ended >= 24 else (0,))
    expected = measured(undisturbed)
    assert measured(again) == {step: expected[step] for step in range(resumed + 1, 7)}
    model = undisturbed.ctx.run_dir / "model"
    assert same_weights(weights(tmp_path / "died/model"), weights(model))
    # Those of the steps that are repeated are read, and none of them ends by `length`.
    assert set(written) <= {"terminated", "length"}
    total = (tmp_path / "died.txt").read_text().count("over")
    of_whole = file.read_text().count("over")
    not_written = before - written.count("terminated")  # over, but killed before they were kept
    assert total == of_whole + not_written
    assert 0 <= not_written <= 8


@pytest.mark.slow
def test_flat_groups_are_replaced_and_successes_replayed(tmp_path):
    file = tmp_path / "over.txt"
    dataset = rows(tmp_path / "tasks.jsonl", *[{"file": str(file)}] * 4)
    made = trained(spec(dataset=dataset, **TAKEN_AGAIN), tmp_path / "run")
    found = measured(made)
    assert sum(one["resampled"] for one in found.values()) > 0
    assert sum(one["replayed"] for one in found.values()) > 0
    assert all(one["episodes"] == 8 + 4 * one["resampled"] for one in found.values())
    shown = [one for one in kept(tmp_path / "run") if one["replayed"]]
    assert shown
    assert all(one["reward"] > 0 and "[" in one["completion"] for one in shown)


FIRST = pytest.mark.nightly(
    part="episodes", catches="a job that cannot be resumed if it is stopped before its first step"
)


@pytest.mark.slow
@pytest.mark.parametrize("is_first", [False, pytest.param(True, marks=FIRST)])
def test_a_job_stops_within_episodes_and_is_resumed_with_the_same_bits(tmp_path, is_first):
    gate = tmp_path / "gate"
    dataset = rows(tmp_path / "tasks.jsonl", *[{"gate": str(gate)}] * 4)
    job = spec(dataset=dataset, **TAKEN_AGAIN | {"environment": "games:GatedDigits"})
    gate.touch()
    whole = trained(job, tmp_path / "whole")
    made = tiny.surroundings(tmp_path / "stopped")
    folder = tmp_path / "stopped" / FOLDER

    def hold() -> None:
        """Hold up the episodes of a later step, or of the first, and stop the job then."""
        wait_until(lambda: is_first or len(made.of_type("step")) >= 4)
        gate.unlink()
        wait_until(lambda: (folder / f"{len(made.of_type('step'))}.jsonl").exists())
        time.sleep(0.5)
        made.stop.set()

    watcher = threading.Thread(target=hold)
    watcher.start()
    with pytest.raises(Stopped) as stopped:
        run(job, replace(made.ctx, code_folders=(GAMES,)))
    watcher.join()
    done = len(made.of_type("step"))
    assert stopped.value.step == done < 6
    gate.touch()
    again = trained(job, tmp_path / "stopped")
    assert (again.of_type("begin")[0]["resumed_from"] or 0) == done
    expected = measured(whole)
    assert measured(again) == {step: expected[step] for step in range(done + 1, 7)}
    assert same_weights(weights(tmp_path / "stopped/model"), weights(tmp_path / "whole/model"))


@pytest.mark.slow
def test_held_out_tasks_are_measured_before_and_after(tmp_path):
    made = tiny.surroundings(tmp_path / "run")
    found = run(spec(eval_samples=5), replace(made.ctx, code_folders=(GAMES,)))
    assert 0 < found["reward_before"] < 3
    assert found["reward_before"] != found["reward_after"]
    assert {one["n"] for one in made.of_type("eval")} == {5}
    seeds = [one.row for one in spec(eval_samples=5).parts.held_out]
    assert seeds == [12, 13, 14, 15, 16]


@pytest.mark.slow
def test_late_episodes_are_left_out_or_have_the_reward_that_was_asked_for(tmp_path):
    late = {"environment": "games:LateDigits", "environment_step_timeout": 3, "samples": 2}
    made = trained(spec(**late, environment_attempts=1), tmp_path / "out")
    (step,) = measured(made).values()
    failed = made.of_type("episode_failed")
    assert failed
    assert {one["task"] for one in failed} == {1}
    assert all(one["reason"] == "timeout" for one in failed)
    assert step["ends"]["timeout"] == len(failed)
    made = trained(spec(**late, timeout_reward=-1.0), tmp_path / "counted")
    (step,) = measured(made).values()
    assert step["ends"]["timeout"] == len(failed)
    assert step["retried"] == 0
    assert not made.of_type("episode_failed")
    assert step["reward"] < 0


@pytest.mark.slow
def test_an_environment_that_never_begins_ends_the_job_in_its_words(tmp_path):
    with pytest.raises(JobFailed, match=r"10 consecutive groups.*no more cards"):
        trained(spec(environment="games:Broken"), tmp_path / "run")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"environment": None}, "max_turn_length: must go with environment"),
        ({"reward": ["math"]}, "reward: must be module:function with environment, got math"),
        ({"nodes": 2}, "nodes: must not go with environment"),
        ({"chat_template": True}, "chat_template: must not go with environment"),
        ({"stop": [""]}, "stop: must be text, each, got ''"),
        ({"max_turns": 0}, "max_turns: must be an integer of at least 1"),
    ],
)
def test_options_that_do_not_go_together_are_refused_by_name(options, words):
    with pytest.raises(SpecError, match=words):
        spec(**options)


def test_the_limits_of_the_processes_are_those_of_the_options(tmp_path):
    job = spec(
        environment_timeout=9,
        environment_reset_timeout=8,
        environment_step_timeout=7,
        environment_memory=0.5,
        concurrency=3,
    )
    assert job.limits == Limits(reset_s=8, step_s=7, episode_s=9, memory_bytes=500_000_000)
    assert [job.pool((), episodes).size for episodes in (2, 100)] == [2, 3]
    assert spec().pool((), 100).size == 16


def test_all_samples_need_a_data_set():
    with pytest.raises(SpecError, match="samples: must be a number with environment"):
        spec(samples="all").located(Path.cwd())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 9, "eval_samples": 2}, r"samples: must be at most 5 \(the tasks of"),
        ({"samples": 3, "eval_samples": 3}, "eval_samples: must be at most 2 .* without 3 for the"),
        ({"samples": "all", "eval_samples": 5}, "eval_samples: must be at most 4"),
    ],
)
def test_more_tasks_than_records_are_refused_by_the_option_that_asks_for_them(
    tmp_path, options, words
):
    dataset = rows(tmp_path / "tasks.jsonl", *[{"key": number} for number in range(5)])
    with pytest.raises(SpecError, match=f"^{words}"):
        spec(dataset=dataset, prompts_per_step=1, **options).located(Path.cwd()).parts  # noqa: B018


def test_the_tasks_after_those_of_the_training_are_held_out(tmp_path):
    dataset = rows(tmp_path / "tasks.jsonl", *[{"key": number} for number in range(5)])
    for samples, expected in ((2, [2, 3]), ("all", [3, 4])):
        found = spec(dataset=dataset, samples=samples, eval_samples=2).located(Path.cwd())
        assert [one.columns["key"] for one in found.parts.held_out] == expected


def test_records_are_tasks_whose_columns_reset_gets(tmp_path):
    dataset = rows(tmp_path / "tasks.jsonl", {"file": "a"}, {"file": "a"}, {"question": "q?"})
    found = spec(dataset=dataset, samples="all", prompts_per_step=1).located(Path.cwd())
    assert found.samples == 3
    assert [one.prompt for one in found.parts.training] == ["", "", "q?"]
    assert found.parts.training[0].columns == {"file": "a"}


@pytest.mark.slow
def test_a_model_plays_with_tools_by_its_chat_template(tmp_path):
    tokens = tokenizer(source_of("qwen3"))
    model = make("Qwen2", vocab_size=len(tokens), max_position_embeddings=4096)
    made = tiny.surroundings(tmp_path / "run", model)
    cast(tiny.Models, made.ctx.models).tokenizer = tokens
    tasks = rows(tmp_path / "tasks.jsonl", *[{"key": 1, "cells": [3, 4]}] * 2)
    options = {"environment": "games:Table", "dataset": tasks, "samples": 2, "stop": []}
    run(spec(**options), replace(made.ctx, code_folders=(GAMES,)))
    (begin,) = made.of_type("begin")
    assert begin["interface"] == "tools"
    (step,) = made.of_type("step")
    assert set(step["ends"]) <= {"answered", "length"}  # a random model calls nothing
    assert step["reward"] == 0


def test_a_stop_text_does_not_end_turns_of_a_chat_template(tmp_path):
    tokens = tokenizer(source_of("qwen3"))
    made = tiny.surroundings(tmp_path / "run", make("Qwen2", vocab_size=len(tokens)))
    cast(tiny.Models, made.ctx.models).tokenizer = tokens
    with pytest.raises(JobFailed, match="stop: must be unset for demo, whose chat template ends"):
        run(spec(stop=["x"]), replace(made.ctx, code_folders=(GAMES,)))


def test_a_record_has_no_tools_of_its_own(tmp_path):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "1+1"}]
    dataset = rows(tmp_path / "tasks.jsonl", {"messages": messages, "tools": [tool]})
    found = spec(dataset=dataset, samples=1, prompts_per_step=1)
    with pytest.raises(SpecError, match="tools: must be absent with environment, got one"):
        found.located(Path.cwd()).parts  # noqa: B018


@pytest.mark.slow
def test_what_an_environment_creates_has_the_users_umask(tmp_path):
    file = tmp_path / "over.txt"
    tasks = rows(tmp_path / "tasks.jsonl", *[{"file": str(file)}] * 2)
    before = os.umask(0o027)
    try:
        options = {"dataset": tasks, "samples": 2, "max_completion_length": 1000}
        trained(spec(environment="games:CountedDigits", **options), tmp_path / "run")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o640


def test_tools_need_a_chat_template(tmp_path):
    tasks = rows(tmp_path / "tasks.jsonl", *[{"key": 1, "cells": [3, 4]}] * 2)
    with pytest.raises(JobFailed, match="tools need a model with a chat template"):
        trained(spec(environment="games:Table", dataset=tasks, samples=2), tmp_path / "run")
