"""Packed DPO: the same losses, gradients and weights as TRL's DPOTrainer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dpo_jobs
import pytest
import sft_jobs
import torch
from breadth import mostly_slow
from peft import LoraConfig

from warmd.jobs.dpo.dataset import Example
from warmd.jobs.dpo.options import LOSSES, SMOOTHED
from warmd.jobs.dpo.task import Batch
from warmd.jobs.sequences.packs import Pack, split
from warmd.jobs.sequences.padded import Padded
from warmd.jobs.sequences.sequence import Sequence as Tokens
from warmd.jobs.training.deprecations import no_deprecations

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


def assert_same(folder: Any, model: Any, form: str, **options: Any) -> Any:
    # TRL's last: arguments that are made later reset the state that its trainer uses.
    made = dpo_jobs.trainer("warmd", folder, model, form, **options)
    theirs = dpo_jobs.trainer("trl", folder, model, form, **options)
    sft_jobs.assert_same_training(theirs, made, slack=1e-5)
    return made


OTHERS = pytest.mark.nightly(
    part="oracles", catches="an architecture whose training on pairs differs from TRL's"
)
DAILY = ("llama", "gpt2")  # one that is packed, one that is padded
EACH = [pytest.param(one, marks=() if one in DAILY else OTHERS) for one in ARCHITECTURES]


@pytest.mark.parametrize("architecture", EACH)
def test_every_architecture_trains_as_with_trl(tmp_path, architecture):
    changes, is_packed = ARCHITECTURES[architecture]
    made = assert_same(tmp_path, sft_jobs.small(architecture, **changes), "texts")
    assert (made.task.scorer.most_tokens is not None) == is_packed


@pytest.mark.slow
@pytest.mark.parametrize("architecture", EACH)
def test_every_architecture_trains_an_adapter_as_with_trl_and_peft(tmp_path, architecture):
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    changes, is_packed = ARCHITECTURES[architecture]
    model = sft_jobs.small(architecture, **changes)
    made = assert_same(tmp_path, model, "texts", lora=lora)
    assert (made.task.scorer.most_tokens is not None) == is_packed


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """TRL's trainer and warmd's training, their policies alike and away from the reference."""
    folder = tmp_path_factory.mktemp("sides")
    # TRL's last: arguments that are made later reset the state that its trainer uses.
    ours, theirs = (
        dpo_jobs.trainer(side, folder, sft_jobs.small("llama")) for side in ("warmd", "trl")
    )
    made = [theirs, ours]
    made[1].task.before_update()
    for one in made:
        torch.manual_seed(0)
        for weight in one.model.parameters():
            weight.data += 0.05 * torch.randn_like(weight)
    return made


def stock_loss_and_gradients(one: Any, loss_type: str) -> tuple[float, list[torch.Tensor]]:
    one.loss_types, one.label_smoothing = [loss_type], 0.1 if loss_type in SMOOTHED else 0.0
    one.current_gradient_accumulation_steps = 1
    batch = next(iter(one.get_train_dataloader()))
    one.model.train()
    one.model.zero_grad()
    with no_deprecations():
        loss = one.compute_loss(one.model, batch)
    loss.backward()
    return loss.item(), [weight.grad.clone() for weight in one.model.parameters()]


def loss_and_gradients(one: Any, loss_type: str) -> tuple[float, list[torch.Tensor]]:
    one.task.loss_type = loss_type
    smoothing = 0.1 if loss_type in SMOOTHED else 0.0
    one.task.strength = replace(one.task.strength, label_smoothing=smoothing)
    (micro_batch,) = next(one.task.batches(0))
    one.model.train()
    one.model.zero_grad()
    loss = 0.0
    for part in one.task.loss(micro_batch):
        if part.value.requires_grad:
            part.value.backward()
        loss += float(part.value.detach()) if part.amount is None else part.amount
    return loss, [weight.grad.clone() for weight in one.model.parameters()]


OTHER_PACKS = pytest.mark.nightly(
    part="oracles", catches="a loss that depends on the number of packs of a step"
)


@pytest.mark.parametrize(
    "most_tokens", [None, 30, *(pytest.param(one, marks=OTHER_PACKS) for one in (1, 1000))]
)
@pytest.mark.parametrize(
    "loss_type", mostly_slow(LOSSES, but=("sigmoid", "ipo", "exo_pair", "sft"))
)
def test_every_loss_equals_trls_in_one_pack_or_several_or_padded(sides, loss_type, most_tokens):
    expected, theirs = stock_loss_and_gradients(sides[0], loss_type)
    sides[1].task.scorer.most_tokens = most_tokens
    loss, ours = loss_and_gradients(sides[1], loss_type)
    assert loss == pytest.approx(expected, rel=2e-5)
    largest = max(float(gradient.abs().max()) for gradient in theirs)
    assert largest > 0
    for our_gradient, their_gradient in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our_gradient, their_gradient, rtol=2e-5, atol=2e-5 * largest)


@pytest.mark.parametrize("case", mostly_slow(CASES, but=("cut", "micro-steps")))
def test_every_form_of_pair_trains_as_with_trl(tmp_path, case):
    form, options = CASES[case]
    assert_same(tmp_path, sft_jobs.small("qwen2", tie_word_embeddings=True), form, **options)


@pytest.mark.parametrize(
    "architecture", ["llama", *(pytest.param(one, marks=OTHERS) for one in ("qwen3", "gpt2"))]
)
@pytest.mark.parametrize("form", mostly_slow(SHORT, but=("no prompt",)))
def test_short_equal_and_promptless_completions_train_as_with_trl(tmp_path, form, architecture):
    options = {"per_device_train_batch_size": 7, **SHORT[form]}
    assert_same(tmp_path, sft_jobs.small(architecture), form, **options)


def test_rewards_are_exactly_0_before_the_first_update(tmp_path):
    made = dpo_jobs.trainer("warmd", tmp_path, sft_jobs.small("qwen3"))
    made.task.scorer.most_tokens = 30
    first = sft_jobs.train(made)[0][0]
    assert (first["rewards/chosen"], first["rewards/rejected"]) == (0, 0)


def test_a_prompt_is_computed_once_for_both_completions(tmp_path):
    made = dpo_jobs.trainer("warmd", tmp_path, sft_jobs.small("llama"))
    (micro_batch,) = next(made.task.batches(0))
    groups = Batch.of(micro_batch.rows).sequences
    (pack,) = (Pack(part) for part in split(groups, 1000))
    sequences = [one for pair in groups for one in pair]
    inputs = sum(map(len, {one.head for one in sequences})) + sum(len(s.tail) for s in sequences)
    assert pack.ids.shape == (1, inputs)
    assert inputs < int(Padded(sequences, 0, "cpu").is_token.sum())
    assert len(pack.targets) == sum(len(one.scored) for one in sequences)


def test_a_pair_whose_prompt_has_no_token_of_its_own_is_scored_from_its_second_token():
    batch = Batch.of([Example([], [5, 6, 7], [8, 9])])
    chosen = Tokens((5, 6, 7), (0, 1, 1), 0, column=-1, shared=1)
    assert batch.sequences == [(chosen, Tokens((8, 9), (0, 1), 1, column=-1, shared=1))]
