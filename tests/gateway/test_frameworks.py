"""Frameworks and other clients, unmodified, each in an environment of its own: today's packages."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cross_encoders
import pytest
import tool_chats
import torch
from daemons import Daemon
from environments import environment
from transformers import LlamaConfig, LlamaForCausalLM
from waiting import wait_until

from warmd.configs.config import ModelConfig
from warmd.daemon.client import control

SCRIPTS = Path(__file__).parent / "frameworks"
PACKAGES = {
    "with_openai_agents": ["openai-agents"],
    "with_langchain": ["langchain-openai"],
    "with_pydantic_ai": ["pydantic-ai-slim[openai]"],
}
RERANKERS = {"with_cohere": ["cohere"]}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that serves a random model with the chat template of Qwen3."""
    folder = tmp_path_factory.mktemp("tools")
    tokenizer = tool_chats.tokenizer(tool_chats.source_of("qwen3"))
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 4096,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes)).save_pretrained(folder)
    control.load_model(shared_daemon.config, ModelConfig(name="tools", path=str(folder)))
    yield f"{wait_until(lambda: shared_daemon.status()['http']['url'])}/v1"
    control.unload_model(shared_daemon.config, "tools")


@pytest.fixture(scope="module")
def scorer(shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A daemon that serves a random cross-encoder."""
    folder = cross_encoders.save(tmp_path_factory.mktemp("scorer") / "model")
    control.load_model(shared_daemon.config, ModelConfig(name="scorer", path=str(folder)))
    yield f"{wait_until(lambda: shared_daemon.status()['http']['url'])}/v1"
    control.unload_model(shared_daemon.config, "scorer")


def check(folder: Path, script: str, packages: list[str], url: str) -> None:
    """Run a script in an environment of its own; it must end without an error."""
    python = environment(folder / "environment", *packages)
    ran = subprocess.run(
        [python, SCRIPTS / f"{script}.py", url], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]


@pytest.mark.nightly(
    part="clients", catches="an answer that a framework for agents does not understand"
)
@pytest.mark.parametrize("script", PACKAGES)
def test_a_framework_calls_tools_and_fills_in_forms(tmp_path: Path, url: str, script: str):
    check(tmp_path, script, PACKAGES[script], url)


@pytest.mark.nightly(
    part="clients", catches="scores that a client for reranking does not understand"
)
@pytest.mark.parametrize("script", RERANKERS)
def test_a_client_for_reranking_reads_the_scores(tmp_path: Path, scorer: str, script: str):
    check(tmp_path, script, RERANKERS[script], scorer)
