"""A tiny random model with Qwen3's chat template, whose tags of calls and thinking are tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf_models
import pytest
import tiny
import trl.chat_template_utils as trl
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="package")
def qwen_model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    made = gguf_models.make(folder, "qwen2", "qwen2", max_position_embeddings=1024)
    made.requires_grad_(False)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<tool_call>", "</tool_call>", "<think>", "</think>"])
    tokenizer.chat_template = trl.qwen3_chat_template
    return made, tokenizer


@pytest.fixture
def qwen(tmp_path: Path, qwen_model: tuple[Any, Any]) -> tiny.Surroundings:
    """The surroundings of a job on that model."""
    made, tokenizer = qwen_model
    found = tiny.surroundings(tmp_path / "job", made)
    models: Any = found.ctx.models
    models.tokenizer = tokenizer
    return found
