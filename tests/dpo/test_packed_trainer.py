"""Packed DPO: the same losses, gradients and weights as TRL's DPOTrainer."""

from __future__ import annotations

from typing import Any

import dpo_jobs
import pytest
import sft_jobs
import torch
from peft import LoraConfig

from warmd.jobs.compute.aten_overrides import fast_kernels
from warmd.jobs.dpo.options import LOSSES, SMOOTHED
from warmd.jobs.dpo.packed_trainer import pairs_of
from warmd.jobs.packing.shared_prompts import Pack, Sample, split
from warmd.jobs.training.deprecations import no_deprecations
from warmd.jobs.training.reference import copy_shared_weights

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

ARCHITECTURES: dict[str, tuple[dict[str, Any], bool]] = {
    "llama": ({"tie_word_embeddings": False}, True),
    "qwen2": ({"tie_word_embeddings": True}, True),
    "qwen3": ({"tie_word_embeddings": True}, True),
    "gemma2": ({"query_pre_attn_scalar": 4, "sliding_window": 8}, False),
    "gpt2": ({}, False),
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "chats": ("chats", {}),
    "cut": ("texts", {"max_length": 8}),
    "micro-steps": (
        "texts",
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3},
    ),
    "AdamW": ("chats", {"optim": "adamw_torch_fused", "learning_rate": 1e-3}),
    "beta": ("texts", {"beta": 2.0}),
}
SHORT: dict[str, dict[str, Any]] = {
    "one token": {"max_length": 5},
    "equal": {"max_length": 5},
    "no prompt": {},
}
MISSING = {"logits/chosen", "logits/rejected"}  # would need all logits


def assert_same(folder: Any, model: Any, form: str, **options: Any) -> Any:
    theirs = sft_jobs.train(dpo_jobs.trainer("trl", folder, model, form, **options))
    made = dpo_jobs.trainer("warmd", folder, model, form, **options)
    starts = [w.detach().clone() for w in made.model.parameters() if w.requires_grad]
    is_packed = made.most_tokens is not None
    with fast_kernels():  # as in a job
        ours = sft_jobs.train(made)
    assert len(ours[0]) == len(theirs[0]) == 6  # with the summary
    for our, their in zip(ours[0], theirs[0], strict=True):
        expected = {k: v for k, v in their.items() if not is_packed or k not in MISSING}
        assert our == pytest.approx(expected, rel=2e-5, abs=1e-5)
    largest = max(float(gradient.abs().max()) for gradient in theirs[1])
    for our_gradient, their_gradient in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(our_gradient, their_gradient, rtol=2e-5, atol=2e-5 * largest)
    moved = max(
        float((weight - start).abs().max()) for weight, start in zip(theirs[2], starts, strict=True)
    )
    assert moved > 0
    for our_weight, their_weight in zip(ours[2], theirs[2], strict=True):
        torch.testing.assert_close(our_weight, their_weight, rtol=0, atol=2e-4 * moved)
    return made


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_trains_as_with_trl(tmp_path, architecture):
    changes, is_packed = ARCHITECTURES[architecture]
    made = assert_same(tmp_path, sft_jobs.small(architecture, **changes), "texts")
    assert (made.most_tokens is not None) == is_packed


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_trains_an_adapter_as_with_trl_and_peft(tmp_path, architecture):
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    changes, is_packed = ARCHITECTURES[architecture]
    model = sft_jobs.small(architecture, **changes)
    made = assert_same(tmp_path, model, "texts", lora=lora)
    assert (made.most_tokens is not None) == is_packed


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """TRL's trainer and warmd's, their policies alike and away from the reference."""
    folder = tmp_path_factory.mktemp("sides")
    made = [dpo_jobs.trainer(side, folder, sft_jobs.small("llama")) for side in ("trl", "warmd")]
    copy_shared_weights(made[1].model, made[1].ref_model)
    for one in made:
        torch.manual_seed(0)
        for weight in one.model.parameters():
            weight.data += 0.05 * torch.randn_like(weight)
        one.current_gradient_accumulation_steps = 1
    return made


def loss_and_gradients(one: Any, loss_type: str) -> tuple[float, list[torch.Tensor]]:
    one.loss_types, one.label_smoothing = [loss_type], 0.1 if loss_type in SMOOTHED else 0.0
    batch = next(iter(one.get_train_dataloader()))
    one.model.train()
    one.model.zero_grad()
    with no_deprecations():
        loss = one.compute_loss(one.model, batch)
    loss.backward()
    return loss.item(), [weight.grad.clone() for weight in one.model.parameters()]


@pytest.mark.parametrize("most_tokens", [1, 30, 1000])
@pytest.mark.parametrize("loss_type", LOSSES)
def test_every_loss_equals_trls_in_one_pack_or_several(sides, loss_type, most_tokens):
    expected, theirs = loss_and_gradients(sides[0], loss_type)
    sides[1].most_tokens = most_tokens
    loss, ours = loss_and_gradients(sides[1], loss_type)
    assert loss == pytest.approx(expected, rel=2e-5)
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    assert largest > 0
    for our_gradient, their_gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our_gradient, their_gradient, rtol=2e-5, atol=2e-5 * largest)


@pytest.mark.parametrize("case", CASES)
def test_every_form_of_pair_trains_as_with_trl(tmp_path, case):
    form, options = CASES[case]
    assert_same(tmp_path, sft_jobs.small("qwen2", tie_word_embeddings=True), form, **options)


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2"])
@pytest.mark.parametrize("form", SHORT)
def test_short_equal_and_promptless_completions_train_as_with_trl(tmp_path, form, architecture):
    options = {"per_device_train_batch_size": 7, **SHORT[form]}
    assert_same(tmp_path, sft_jobs.small(architecture), form, **options)


def test_rewards_are_exactly_0_before_the_first_update(tmp_path):
    made = dpo_jobs.trainer("warmd", tmp_path, sft_jobs.small("qwen3"))
    made.most_tokens = 30
    first = sft_jobs.train(made)[0][0]
    assert (first["rewards/chosen"], first["rewards/rejected"]) == (0, 0)


def test_a_prompt_is_computed_once_for_both_completions(tmp_path):
    made = dpo_jobs.trainer("warmd", tmp_path, sft_jobs.small("llama"))
    batch = next(iter(made.get_train_dataloader()))
    pairs = pairs_of(batch)
    (pack,) = (Pack(part) for part in split(pairs, 1000))
    prompts = {sample.prompt for pair in pairs for sample in pair}
    inputs = sum(map(len, prompts)) + sum(s.num_inputs for pair in pairs for s in pair)
    assert pack.ids.shape == (1, inputs)
    assert inputs < int(batch["attention_mask"].sum())
    assert len(pack.targets) == int(batch["completion_mask"].sum())


def test_a_pair_whose_prompt_has_no_token_of_its_own_is_scored_from_its_second_token():
    batch = {
        "input_ids": torch.tensor([[5, 6, 7], [8, 9, 0]]),
        "attention_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    assert pairs_of(batch) == [(Sample(0, (5,), (6, 7)), Sample(1, (8,), (9,)))]
