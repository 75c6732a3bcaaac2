"""Scripted episodes with tools: the tokens, the masks and the rewards of TRL's trainer."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path
from typing import Any

import pytest
from scripted_policy import Script, StockRollouts
from tool_chats import source_of, tokenizer

from warmd.jobs.environments.calls import CallReader
from warmd.jobs.environments.environment_player import EnvironmentPlayer
from warmd.jobs.environments.episodes import Episode, Rules
from warmd.jobs.environments.pool import Limits, Pool, described
from warmd.jobs.environments.tasks import Task
from warmd.jobs.environments.turns import ChatTurns

FOLDER = str(Path(__file__).parent)
FAMILIES = ("qwen2_5", "qwen3", "qwen3_instruct_2507", "glm4moe")
EPISODES = 50  # of each family
MOST_TURNS = 4


def rows() -> list[dict[str, Any]]:
    return [{"key": key, "cells": [key * 7 % 10, key * 3 % 10, 5]} for key in range(EPISODES)]


def scripts(family: str) -> list[list[str]]:
    """What the policy writes in the turns of each episode: calls, some of them wrong; an answer."""
    draw = random.Random(family)
    found = []
    for _ in range(EPISODES):
        calls = [_calls(family, draw) for _ in range(draw.randrange(MOST_TURNS))]
        end = draw.choice(["The number is 7.", "", "<tool_call>\nread(2)", "{}"])
        found.append([*calls, end])
    return found


def _calls(family: str, draw: random.Random) -> str:
    before = draw.choice(["", "I will look.\n"])
    names = draw.choice([["read"], ["read"], ["count"], ["nothing"], ["read", "read"]])
    return before + "\n".join(
        _call(family, name, {"cell": draw.randrange(5)} if name == "read" else {}) for name in names
    )


def _call(family: str, name: str, arguments: dict[str, int]) -> str:
    if family == "glm4moe":
        pairs = "".join(
            f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"<tool_call>{name}\n{pairs}</tool_call>"
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{text}\n</tool_call>"


def played(tokens: Any, turns: list[list[str]]) -> list[Episode]:
    tools = described("games:Table", [FOLDER], 60.0).tools
    assert tools is not None
    with Pool("games:Table", [FOLDER], size=4, limits=Limits(step_s=20)) as pool:
        player = EnvironmentPlayer(
            pool,
            Script(tokens, turns),
            ChatTurns(tokens, ends={tokens.eos_token_id}, tools=tools),
            Rules(max_turn_tokens=1000, max_tokens=100_000, max_turns=MOST_TURNS + 1),
            numbers=lambda key, turn: [0.5] * 1000,
            calls=CallReader(tokens, tools).of,
        )
        tasks = [Task(number, row) for number, row in enumerate(rows())]
        groups = [(number, range(1)) for number in range(len(tasks))]
        return [group[0] for group in player.play(tasks, groups)]


OTHERS = pytest.mark.nightly(
    part="oracles",
    catches="a family of templates with which an episode has other tokens than TRL's",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of TRL's: environments are experimental, old names
@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one == "qwen3" else OTHERS) for one in FAMILIES]
)
def test_tokens_masks_and_rewards_are_those_of_trl(tmp_path, family):
    tokens = tokenizer(source_of(family))
    turns = scripts(family)
    ours = played(tokens, turns)
    table = runpy.run_path(str(Path(FOLDER, "games.py")))["Table"]
    stock = StockRollouts(tokens, rows(), table, tmp_path, most_turns=MOST_TURNS + 1)
    theirs = stock.play(turns)
    for number, episode in enumerate(ours):
        assert episode.failure is None, episode.failure
        prompt = theirs["prompt_ids"][number][theirs["prompt_mask"][number].bool()]
        assert episode.prompt == prompt.tolist()
        is_there = theirs["completion_mask"][number].bool()
        written = [token for one in episode.written for token in one.ids]
        assert written == theirs["completion_ids"][number][is_there].tolist()
        mask = [int(not one.is_given) for one in episode.written for _ in one.ids]
        assert mask == theirs["tool_mask"][number][is_there].tolist()
    rewards = [episode.reward for episode in ours]
    pairs = [rewards[at : at + 2] for at in range(0, EPISODES, 2)]
    assert max(len(one.written) for one in ours) == 2 * MOST_TURNS - 1
    for (one, other), advantage in zip(pairs, theirs["advantages"][::2].tolist(), strict=True):
        assert (one > other) == (advantage > 0)  # type: ignore[operator]
