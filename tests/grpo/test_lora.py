"""GRPO with LoRA: the results of TRL and PEFT with less computation."""

from __future__ import annotations

from typing import Any

import pytest
import sft_jobs
import torch
from group_trainers import CASES, small, train, trainer
from peft import LoraConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from warmd.jobs.compute.aten_overrides import fast_kernels
from warmd.jobs.grpo.packed_trainer import PackedTrainer

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


LORA = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def assert_same(folder: Any, model: Any, **options: Any) -> Any:
    """Train with TRL and PEFT and with packs; compare all logs and the final adapters."""
    options["lora"] = LORA
    theirs, their_weights = train(trainer(GRPOTrainer, folder, model, **options))
    made = trainer(PackedTrainer, folder, model, **options)
    with fast_kernels():  # as in a job
        ours, our_weights = train(made)
    assert len(ours) == len(theirs) == 6  # with the summary
    for our, their in zip(ours, theirs, strict=True):
        assert our == pytest.approx(their, rel=2e-5, abs=2e-6, nan_ok=True)
    moved = max(float(weight.abs().max()) for weight in their_weights[1::2])  # B begins at zero
    assert moved > 0
    for our_weight, their_weight in zip(our_weights, their_weights, strict=True):
        torch.testing.assert_close(our_weight, their_weight, rtol=0, atol=2e-4 * moved)
    return made


@pytest.mark.usefixtures("shared_sampler")
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_five_packed_steps_end_with_the_adapter_of_trl_and_peft(tmp_path, architecture, beta):
    made = assert_same(tmp_path, small(architecture, tie_word_embeddings=True), beta=beta)
    assert made.most_tokens is not None


@pytest.mark.usefixtures("shared_sampler")
@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("gemma2", {"query_pre_attn_scalar": 4, "sliding_window": 8}), ("gpt2", {})],
)
def test_a_model_that_cannot_be_packed_trains_an_adapter_by_trl(
    tmp_path, architecture, changes, beta
):
    made = assert_same(tmp_path, sft_jobs.small(architecture, **changes), beta=beta)
    assert made.most_tokens is None


@pytest.mark.usefixtures("shared_sampler")
@pytest.mark.parametrize(
    "case", ["AdamW", "workload", "two prompts a step", "iterations with beta"]
)
def test_training_of_an_adapter_takes_the_options_of_trl(tmp_path, case):
    assert_same(tmp_path, small("llama"), **CASES[case])
