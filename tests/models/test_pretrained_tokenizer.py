"""Tokenizers whose files change a text's tokens: BPE dropout is off, appended ends are said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tiny
from odd_tokenizers import merging
from shell import warmd
from tokenizers import processors

from warmd.configs.config import ModelConfig
from warmd.daemon.fork.models import WarmModels
from warmd.jobs.context import WarmModel
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.models.pretrained_tokenizer import read_tokenizer
from warmd.jobs.models.tokenizer_folder import TokenizerFolder


def test_bpe_dropout_is_off(tmp_path):
    tokenizer = merging()
    tokenizer.backend_tokenizer.model.dropout = 0.5
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text())["model"]["dropout"] == 0.5
    text = "a c a c a c a c a c"
    expected = merging()(text)["input_ids"]
    count = TokenizerFolder(tmp_path).counter()
    assert count is not None
    for _ in range(20):
        assert read_tokenizer(tmp_path)(text)["input_ids"] == expected
        assert count(text) == len(expected)


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A model folder whose tokenizer appends the end token to texts."""
    folder = shutil.copytree(tiny_model, tmp_path / "m")
    tokenizer = tiny.tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    return folder


def load(folder: Path) -> WarmModel:
    config = ModelConfig(name="m", path=str(folder))
    return WarmModels(10**9).ensure(config, folder, in_use=()).warm


def test_a_job_warns_of_an_end_token_that_the_tokenizer_appends_to_prompts(folder, tmp_path):
    job = tiny.surroundings(tmp_path / "infer-20261121-184200-x7f2")
    warm = load(folder)
    assert warm.appended_end == "<eos>"
    job.ctx.models.take = lambda name: warm  # type: ignore[method-assign]
    run(InferSpec.parse({"model": "m", "prompt": "1+1=", "max_tokens": 2}), job.ctx)
    (warning,) = (event for event in job.events if event["type"] == "warning")
    assert warning["message"] == (
        "model: its tokenizer appends <eos> to prompts: completions begin a new text, except in "
        "chats"
    )


@pytest.mark.slow
def test_load_says_so(shared_daemon, folder):
    home = shared_daemon.config.home
    done = warmd("load", "--once", f"ended={folder}", home=home)
    assert "ended: its tokenizer appends <eos> to prompts: " in done.err
    assert warmd("models", "--unload", "ended", home=home).code == 0


def test_nothing_is_said_of_other_tokenizers(tiny_model):
    assert load(tiny_model).appended_end is None
