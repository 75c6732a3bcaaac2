"""Agent frameworks, unmodified, each in an environment of its own: the packages of today."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tool_chats
import torch
from daemons import Daemon
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
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly(
        part="clients", catches="an answer that a framework for agents does not understand"
    ),
]


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


@pytest.mark.parametrize("script", PACKAGES)
def test_a_framework_calls_tools_and_fills_in_forms(tmp_path: Path, url: str, script: str):
    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    python = environment / "bin" / "python"
    install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([python, *install, *PACKAGES[script]], check=True)
    ran = subprocess.run(
        [python, SCRIPTS / f"{script}.py", url], capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
