"""Episodes whose actions are calls of tools: TRL's class, with what a scripted policy writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from scripted_policy import Script
from tool_chats import source_of, tokenizer

from warmd.jobs.environments.calls import CallReader
from warmd.jobs.environments.environment_player import EnvironmentPlayer
from warmd.jobs.environments.episodes import ANSWERED, MAX_TURNS, Episode, Key, Rules
from warmd.jobs.environments.pool import Limits, Pool, described
from warmd.jobs.environments.tasks import Task
from warmd.jobs.environments.turns import ChatTurns
from warmd.jobs.errors import JobFailed, SpecError

FOLDER = str(Path(__file__).parent)
ROW = {"key": 2, "cells": [5, 6, 7]}


def called(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def play(*turns: str, row: dict[str, Any] = ROW, environment: str = "games:Table") -> Episode:
    tokens = tokenizer(source_of("qwen3"))
    tools = described(environment, [FOLDER], 60.0).tools
    assert tools is not None
    with Pool(environment, [FOLDER], size=1, limits=Limits(step_s=20)) as pool:
        player = EnvironmentPlayer(
            pool,
            Script(tokens, [turns]),
            ChatTurns(tokens, ends={tokens.eos_token_id}, tools=tools),
            Rules(max_turn_tokens=100, max_tokens=1000, max_turns=3),
            numbers=lambda key, turn: [0.5] * 100,
            calls=CallReader(tokens, tools).of,
        )
        return player.play([Task(0, row)], [(0, range(1))])[0][0]


def test_a_tool_answers_the_policy_until_it_calls_none():
    episode = play(called("read", '{"cell": 2}'), "It is 7.")
    assert episode.failure is None, episode.failure
    assert (episode.reason, episode.turns, episode.reward) == (ANSWERED, 2, 1.0)
    opening, first, result, last = episode.messages
    assert opening == "Which number is in cell 2?"
    assert '"read"' in first
    assert result == [{"role": "tool", "name": "read", "content": "7"}]
    assert last == "It is 7."
    assert [one.is_given for one in episode.written] == [False, True, False]
    tokens = tokenizer(source_of("qwen3"))
    prompt = tokens.decode(episode.prompt)
    assert "Read a cell of the table." in prompt  # the schema, in the prompt as TRL has it
    assert "<tool_response>\n7\n</tool_response>" in tokens.decode(episode.written[1].ids)


@pytest.mark.slow
def test_several_calls_of_a_turn_are_answered_in_order_and_errors_are_told():
    calls = called("read", '{"cell": 0}') + "\n" + called("nothing", "{}")
    episode = play(calls, called("read", '{"cell": 9}'), called("count", "{}"))
    assert (episode.reason, episode.turns, episode.reward) == (MAX_TURNS, 3, 2.0)
    results = [one for one in episode.messages if isinstance(one, list)]
    assert [[one["content"] for one in of_turn] for of_turn in results] == [
        ["5", "{'error': 'Tool nothing not found.'}"],
        ["{'error': 'list index out of range'}"],
    ]


@pytest.mark.slow
def test_a_call_that_cannot_be_read_is_an_answer():
    episode = play('<tool_call>\n{"name": "read", "arguments": {"cell": 2\n</tool_call>')
    assert (episode.reason, episode.turns, episode.reward) == (ANSWERED, 1, 0.0)


@pytest.mark.slow
def test_each_class_of_a_dict_has_its_own_tools():
    row = {**ROW, "environment": "table"}
    episode = play("I do not know.", row=row, environment="games:BOTH")
    assert (episode.reason, episode.reward) == (ANSWERED, 0.0)
    assert Task(0, row).name == "table"
    assert Key(0, 0, 0) == episode.key


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Unpaid", "Unpaid must have a method get_reward, or the job a reward, got neither"),
        pytest.param(
            "Undocumented",
            "the tool read must have type hints and a docstring with Args",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_class_that_cannot_be_played_is_named(name, words):
    with pytest.raises(SpecError, match=f"^environment: {words}"):
        described(f"games:{name}", [FOLDER], 60.0)


def test_a_model_whose_calls_nobody_can_read_is_refused():
    tokens = tokenizer("{{ messages }}")
    with pytest.raises(JobFailed, match="--response-template FILE"):
        CallReader(tokens, {None: []})
