"""A LoRA job in a daemon: from submit to an adapter that is served, exported and merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from daemons import Daemon
from shell import warmd
from transformers import AutoModelForCausalLM

IDS = torch.tensor([[5, 6, 7, 8]])


@pytest.fixture(scope="module")
def job(shared_daemon: Daemon) -> str:
    """A finished LoRA job of a few steps."""
    options: dict[str, Any] = {
        "learning_rate": 0.05,
        "lora_targets": ["q_proj", "v_proj", "down_proj"],
    }
    job_id = shared_daemon.submit(lora=4, **options)
    done = shared_daemon.wait(job_id)
    assert done["status"] == "finished", done["error"]
    return job_id


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_its_adapter_and_the_merged_model_compute_the_same(
    shared_daemon, tiny_model, job, tmp_path
):
    home = shared_daemon.home.path
    adapter, full = tmp_path / "exported", tmp_path / "merged"
    assert warmd("checkpoints", "export", job, str(adapter), home=home).code == 0
    done = warmd("checkpoints", "export", job, str(full), "--merge", home=home)
    assert done.code == 0, done.err
    base: Any = AutoModelForCausalLM.from_pretrained(tiny_model)
    before = logits(base)
    merged: Any = AutoModelForCausalLM.from_pretrained(full)
    by_peft = logits(peft.PeftModel.from_pretrained(base, adapter))
    torch.testing.assert_close(logits(merged), by_peft, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(by_peft, before, atol=1e-2)
    texts = [
        warmd("run", "--model", model, "--temperature", "0", "1+1=", home=home).out
        for model in (job, str(full), str(adapter))
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
def test_only_an_adapter_can_be_merged(shared_daemon, job, tmp_path):
    home = shared_daemon.home.path
    full = shared_daemon.submit()
    shared_daemon.wait(full)
    done = warmd("checkpoints", "export", full, str(tmp_path / "x"), "--merge", home=home)
    assert done.is_refusal(2)
    assert "merge: must be an adapter, got" in done.err
    both = ("--merge", "--with-optimizer")
    done = warmd("checkpoints", "export", job, str(tmp_path / "x"), *both, home=home)
    assert done.is_refusal(2)
    assert not (tmp_path / "x").exists()


def test_a_rank_that_is_too_large_is_refused_and_nothing_is_queued(shared_daemon):
    home = shared_daemon.home.path
    before = sorted(path.name for path in (home / "runs").iterdir())
    done = warmd("submit", "grpo", "--model", "tiny", "--lora", "99", home=home)
    assert done.is_refusal(2)
    assert "lora: must be at most 16, the largest rank of a layer, got 99" in done.err
    assert sorted(path.name for path in Path(home / "runs").iterdir()) == before
