"""Reward functions of episodes: what they get, as in TRL, and what their scores become."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from grpo_jobs import rows
from scripted_policy import Script, StockRollouts
from tool_chats import source_of, tokenizer

from warmd.jobs.environments.calls import CallReader
from warmd.jobs.environments.environment_player import EnvironmentPlayer
from warmd.jobs.environments.episodes import Episode, Rules
from warmd.jobs.environments.pool import Limits, Pool, described
from warmd.jobs.environments.tally import Tally
from warmd.jobs.environments.tasks import Task
from warmd.jobs.environments.turns import ChatTurns
from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec

FOLDER = str(Path(__file__).parent)
ROWS = [{"key": key, "cells": [5, 6, 7, 8]} for key in range(4)]


def called(cell: int) -> str:
    text = json.dumps({"name": "read", "arguments": {"cell": cell}})
    return f"<tool_call>\n{text}\n</tool_call>"


TURNS = [
    [called(0), "It is 5."],
    [called(0), called(1) + "\n" + called(2), "6"],
    ["7, I guess."],
    [called(9), "I do not know."],
]


def play(weights: dict[str, float], environment: str = "games:Table") -> list[Episode]:
    tokens = tokenizer(source_of("qwen3"))
    given: dict[str, Any] = {"rewards": list(weights), "columns": ["key", "cells"]}
    tools = described(environment, [FOLDER], 60.0, **given).tools
    assert tools is not None
    with Pool(environment, [FOLDER], size=2, limits=Limits(step_s=20), **given) as pool:
        player = EnvironmentPlayer(
            pool,
            Script(tokens, TURNS),
            ChatTurns(tokens, ends={tokens.eos_token_id}, tools=tools),
            Rules(max_turn_tokens=100, max_tokens=1000, max_turns=5, attempts=1),
            numbers=lambda key, turn: [0.5] * 100,
            calls=CallReader(tokens, tools).of,
            weights=weights,
        )
        tasks = [Task(number, row) for number, row in enumerate(ROWS)]
        return [one[0] for one in player.play(tasks, [(n, range(1)) for n in range(len(ROWS))])]


def notes(file: Path) -> list[Any]:
    return sorted(json.loads(line) for line in file.read_text().splitlines())


@pytest.mark.filterwarnings("ignore")  # of TRL's: environments are experimental, old names
def test_functions_get_what_trl_gives_them(tmp_path, monkeypatch):
    monkeypatch.setenv("NOTED", str(tmp_path / "ours"))
    play({"games:noted": 1.0})
    games = runpy.run_path(str(Path(FOLDER, "games.py")))
    monkeypatch.setenv("NOTED", str(tmp_path / "theirs"))
    tokens = tokenizer(source_of("qwen3"))
    rewards = [games["noted"]]
    stock = StockRollouts(tokens, ROWS, games["Table"], tmp_path, most_turns=5, rewards=rewards)
    stock.play(TURNS)
    ours, theirs = notes(tmp_path / "ours"), notes(tmp_path / "theirs")
    for one, other in zip(ours, theirs, strict=True):
        assert one == other


def test_weighted_scores_are_added_to_what_the_environment_gives():
    found = play({"games:right": 10.0})
    assert [one.reward for one in found] == [11.0, 13.0, 0.0, 1.0]
    assert [one.parts for one in found] == [
        {"games:right": 1.0, "environment": 1.0},
        {"games:right": 1.0, "environment": 3.0},
        {"environment": 0.0},  # no score
        {"games:right": 0.0, "environment": 1.0},
    ]
    means = Tally.of(found, retried=0, waited_s=0.0).fields()["parts"]
    assert means == {"games:right": pytest.approx(2 / 3), "environment": 1.25}


def test_an_episode_without_any_score_has_no_reward():
    found = play({"games:right": 1.0}, "games:Unrewarded")
    assert [one.reward for one in found] == [1.0, 1.0, None, 0.0]


def test_a_function_that_fails_leaves_the_episode_out_in_its_words():
    found = play({"games:broken": 1.0})
    assert all(one.reward is None for one in found)
    failure = found[0].failure
    assert failure is not None
    assert failure.words.startswith("reward games:broken failed at ")
    assert failure.words.endswith("RuntimeError: no more ideas")


@pytest.mark.parametrize(
    ("environment", "reward", "words"),
    [
        ("games:Table", "games:none", "reward: games:none must be a function of games"),
        ("games:Table", "nowhere:f", "reward: nowhere:f must import, got ModuleNotFoundError"),
        ("games:Table", "games:do", "reward: games:do must take (prompts, completions, answers)"),
        ("games:Unrewarded", None, "must have a method get_reward, or the job a reward, got"),
    ],
)
def test_what_cannot_score_is_refused_at_submission(environment, reward, words):
    given: dict[str, Any] = {} if reward is None else {"rewards": [reward]}
    with pytest.raises(SpecError) as caught:
        described(environment, [FOLDER], 60.0, **given)
    assert words in str(caught.value)


def trained(folder: Path, **options: Any) -> tiny.Surroundings:
    job = {
        "environment": "games:Digits",
        "samples": 4,
        "prompts_per_step": 2,
        "num_generations": 4,
        "max_turn_length": 6,
        "stop": list("abcdefghijklmnopqrstuvwxyz "),
    }
    made = tiny.surroundings(folder)
    run(GrpoSpec.parse(job | options), replace(made.ctx, code_folders=(FOLDER,)))
    return made


@pytest.mark.usefixtures("like_a_work_horse")
def test_a_job_learns_from_the_functions_and_shows_them(tmp_path):
    plain = trained(tmp_path / "plain")
    made = trained(tmp_path / "run", reward=["games:length=-0.5"])
    for one, other in zip(made.of_type("step"), plain.of_type("step"), strict=True):
        if one["step"] > 1:
            break
        parts = one["parts"]
        assert parts["environment"] == pytest.approx(other["reward"])
        assert one["reward"] == pytest.approx(other["reward"] - 0.5 * parts["games:length"])


@pytest.mark.parametrize("name", ["environments", "completion_ids"])
def test_columns_named_like_an_argument_are_refused(tmp_path, monkeypatch, name):
    monkeypatch.chdir(FOLDER)
    data = rows(tmp_path / "tasks.jsonl", {"key": 1, name: 2})
    job = {"environment": "games:Table", "reward": ["games:right"], "dataset": data, "samples": 1}
    with pytest.raises(SpecError, match=f"dataset: must have no column {name}, which rewards"):
        GrpoSpec.parse(job).check_inputs(None)


@pytest.mark.usefixtures("like_a_work_horse")
def test_a_function_that_always_fails_ends_the_job_in_its_words(tmp_path):
    with pytest.raises(JobFailed, match=r"reward games:broken failed at .*no more ideas"):
        trained(tmp_path, samples=20, reward=["games:broken"], environment_attempts=1)
