"""The turns of a policy as an agent gets them, and the prompts that its tools make."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_chats import TOOLS, source_of, tokenizer

from warmd.jobs.engine.dialogues import Turn
from warmd.jobs.engine.rollouts import Segment
from warmd.jobs.environments.agent_replies import AgentTurns
from warmd.jobs.environments.agent_requests import Wanted, read

SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def tokens() -> Any:
    return tokenizer(source_of("qwen3"))


@pytest.fixture(scope="module")
def turns(tokens: Any) -> AgentTurns:
    return AgentTurns(tokens, ends=[tokens.eos_token_id])


def wanted(**options: Any) -> Wanted:
    return read({"messages": json.dumps(HELLO), **options}, SAMPLING)


def test_tools_are_written_as_the_template_writes_them(tokens, turns):
    made = wanted(tools=json.dumps(TOOLS))
    expected = tokens.apply_chat_template(
        HELLO, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert turns.prompt(made.messages, made.tools_text) == tokens(expected)["input_ids"]


@pytest.mark.parametrize(
    ("written", "text", "content"),
    [
        ("a stop b", "a ", "a "),  # as the stream has cut it
        ("xa<bos>b", "x", "x"),  # a special token in the middle of the stop text
    ],
)
def test_a_stop_text_is_no_part_of_the_answer(tokens, turns, written, text, content):
    ids = tokens(written, add_special_tokens=False)["input_ids"]
    turn = Turn(Segment(ids), text, "stop", [])
    choice = turns.choice(turn, wanted(stop=["stop", "ab"]), "seed")
    assert choice["finish_reason"] == "stop"
    assert choice["text"] == content.strip()


def test_a_call_is_read_and_the_same_turn_gives_it_the_same_id(tokens, turns):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    ids = [*tokens(call)["input_ids"], tokens.eos_token_id]
    made = wanted(tools=json.dumps(TOOLS))
    found = [turns.choice(Turn(Segment(ids), call, "stop", []), made, "seed") for _ in range(2)]
    assert found[0] == found[1]
    assert found[0]["finish_reason"] == "tool_calls"
    (one,) = found[0]["calls"]
    assert (one["name"], json.loads(one["arguments"])) == ("add", {"a": 1, "b": 2})
