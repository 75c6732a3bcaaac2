"""GRPO with LoRA: the results of TRL and PEFT with less computation."""

from __future__ import annotations

from typing import Any

import pytest
import sft_jobs
from group_trainers import CASES, assert_same, small
from peft import LoraConfig

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def packs(made: Any) -> bool:
    return made.task.scorer.most_tokens is not None


LORA = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


OTHERS = pytest.mark.nightly(
    part="oracles", catches="an architecture or option whose adapter differs from that of TRL"
)


@pytest.mark.usefixtures("shared_sampler")
@pytest.mark.parametrize(
    ("architecture", "beta"),
    [
        ("llama", 0.0),
        pytest.param("llama", 0.1, marks=OTHERS),
        pytest.param("qwen2", 0.0, marks=OTHERS),
        pytest.param("qwen2", 0.1, marks=OTHERS),
        pytest.param("qwen3", 0.0, marks=OTHERS),
        pytest.param("qwen3", 0.1, marks=pytest.mark.slow),
    ],
)
def test_five_packed_steps_end_with_the_adapter_of_trl_and_peft(tmp_path, architecture, beta):
    made = assert_same(
        tmp_path, small(architecture, tie_word_embeddings=True), beta=beta, lora=LORA
    )
    assert packs(made)


@pytest.mark.usefixtures("shared_sampler")
@pytest.mark.parametrize("beta", [0.1, pytest.param(0.0, marks=OTHERS)])
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        pytest.param(
            "gemma2", {"query_pre_attn_scalar": 4, "sliding_window": 8}, marks=pytest.mark.slow
        ),
        ("gpt2", {}),
    ],
)
def test_a_model_that_cannot_be_packed_trains_an_adapter_as_with_trl(
    tmp_path, architecture, changes, beta
):
    made = assert_same(tmp_path, sft_jobs.small(architecture, **changes), beta=beta, lora=LORA)
    assert not packs(made)


@pytest.mark.slow
@pytest.mark.usefixtures("shared_sampler")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param("AdamW", marks=OTHERS),
        "workload",
        pytest.param("two prompts a step", marks=OTHERS),
        "iterations with beta",
    ],
)
def test_training_of_an_adapter_takes_the_options_of_trl(tmp_path, case):
    assert_same(tmp_path, small("llama"), lora=LORA, **CASES[case])
