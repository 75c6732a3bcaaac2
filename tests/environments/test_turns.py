"""The tokens between two turns: those that TRL's trainer makes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tiny
from tool_chats import FAMILIES, TOOLS, source_of, tokenizer
from trl.chat_template_utils import get_training_chat_template, is_chat_template_prefix_preserving
from trl.trainer.grpo_trainer import GRPOTrainer

from warmd.jobs.environments.turns import ChatTurns, RawTurns
from warmd.jobs.errors import JobFailed

RESULTS = [
    {"role": "tool", "name": "add", "content": "3"},
    {"role": "tool", "name": "add", "content": "{'error': 'no number'}"},
]


def of_trl(tokens: Any, results: list[dict[str, Any]]) -> list[int] | None:
    """What TRL's trainer appends, with the template that it takes; None: it refuses."""
    template = None
    try:
        if not is_chat_template_prefix_preserving(tokens):
            template = get_training_chat_template(tokens)
        trainer: Any = SimpleNamespace(
            _is_vlm=False,
            processing_class=tokens,
            chat_template=template,
            chat_template_kwargs={},
            _tokenizer=tokens,
        )
        return list(GRPOTrainer._get_tool_suffix_ids(trainer, results))
    except Exception:  # a template may refuse tools, and TRL a template
        return None


# Templates that take longest, of families of which another one stays in the tests of every change.
NIGHTLY: tuple[str, ...] = (
    "gemma4",
    "gemma4_v2",
    "gemma4_v4",
    "gemma4_v5",
    "deepseekv3",
    "lfm2_2_5",
    "lfm2_v2",
)
NIGHTLY += ("nemotron_3_nano", "nemotron_3_super", "qwen3_5_think", "qwen3_6")
OTHERS = pytest.mark.nightly(
    part="oracles", catches="a family of templates whose results of tools have other tokens"
)


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=OTHERS if one in NIGHTLY else ()) for one in FAMILIES]
)
def test_results_of_tools_are_the_tokens_of_trl(family):
    tokens = tokenizer(source_of(family))
    try:
        turns = ChatTurns(tokens, ends={tokens.eos_token_id}, tools={None: TOOLS})
    except JobFailed as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:  # TRL leaves out what a template does not use, without a word
        assert "the chat template does not use" in refusal or of_trl(tokens, RESULTS) is None
        return
    for results in (RESULTS[:1], RESULTS):
        expected = of_trl(tokens, results)
        if expected is not None:
            assert turns.observed(results, ["add"] * len(results)) == expected


def test_an_observation_of_a_model_without_a_template_is_its_text():
    tokens = tiny.tokenizer()
    turns = RawTurns(tokens)
    assert turns.prompt("1+1=") == tokens("1+1=")["input_ids"]
    assert turns.observed("2") == tokens("2", add_special_tokens=False)["input_ids"]
    assert turns.observed(None) == []
    with pytest.raises(JobFailed, match=r"^environment: the model has no chat template"):
        turns.observed([{"role": "user", "content": "2"}])
