"""Frameworks for agents, unmodified, as agents of a training: each in an environment of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import framework_talkers
import pytest
import tiny
import tool_chats
import torch
from environments import environment
from gateways import Gateway
from transformers import LlamaConfig, LlamaForCausalLM

from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("like_a_work_horse"),
    pytest.mark.nightly(part="oracles", catches="a framework whose requests an agent cannot send"),
]

SUPPORT = str(Path(framework_talkers.__file__).parent)
PACKAGES = {
    "with_smolagents": ["smolagents[openai]"],
    "with_openai_agents": ["openai-agents"],
    "with_langgraph": ["langgraph", "langchain-openai"],
}


def model() -> tuple[Any, Any]:
    """A random model with the chat template of Qwen3, for the long prompts of frameworks."""
    tokenizer = tool_chats.tokenizer(tool_chats.source_of("qwen3"))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=65536,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


@pytest.mark.parametrize("script", PACKAGES)
def test_each_turn_of_a_framework_is_learned_once(tmp_path, tiny_model, monkeypatch, script):
    python = environment(tmp_path / "environment", *PACKAGES[script])
    monkeypatch.setenv(framework_talkers.PYTHON, str(python))
    monkeypatch.setenv(framework_talkers.SCRIPT, script)
    gateway = Gateway(tmp_path / "home", tiny_model)
    try:
        warm, tokenizer = model()
        made = tiny.surroundings(gateway.home.runs / "grpo-framework", warm)
        cast(tiny.Models, made.ctx.models).tokenizer = tokenizer
        made.ctx = replace(made.ctx, code_folders=(SUPPORT,), job_id="grpo-framework")
        job = {
            "agent": "framework_talkers:framework",
            "samples": 2,
            "prompts_per_step": 1,
            "num_generations": 2,
            "concurrency": 2,
            "max_turns": 64,
            "max_turn_length": 4096,  # a random model ends a turn after 260 tokens on average
            "max_completion_length": 32768,
        }
        run(GrpoSpec.parse(job), made.ctx)
    finally:
        gateway.close()
    steps = made.of_type("step")
    assert len(steps) == 2
    for step in steps:
        failed = [one["message"] for one in made.of_type("episode_failed")]
        assert step["ends"] == {"returned": 2}, failed
        # What the framework says it has asked for, and what is learned.
        assert step["turns"] == step["reward"] >= 2
