"""The dialogues of a training step: of each kind of model, and whatever is in the batch."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import tiny
import torch
from breadth import mostly_slow
from dialogues import PLANS, check, exact, played
from engines import NATIVE_SIZES, make
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, MambaConfig, MambaForCausalLM
from trl.trainer.grpo_config import GRPOConfig

from warmd.jobs.compute.frozen_int8 import quantize_linears
from warmd.jobs.grpo.sampler import Sampler
from warmd.jobs.sequences.attention import can_pack
from warmd.jobs.training.arguments import KEPT_ACTIVATIONS
from warmd.jobs.training.deprecations import no_deprecations

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

VOCABULARY = len(tiny.SPECIAL) + len(tiny.CHARACTERS)


class Kind(NamedTuple):
    """A model, and how it is sampled. `is_exact`: with its own weights, not rounded ones."""

    model: Any
    rollout_dtype: str = "float32"
    packs: bool = True
    is_exact: bool = True


def seeded(make_model: Any) -> Any:
    torch.manual_seed(0)
    made = make_model().eval()
    with torch.no_grad():
        for weight in made.parameters():
            weight.mul_(3)  # a random model is nearly uniform, and then rounding decides nothing
    return made


def qwen(**sizes: Any) -> Any:
    return make("Qwen2", **{"vocab_size": VOCABULARY} | sizes)


def adapted(model: Any, *, is_int8: bool = False) -> Any:
    """A model with an adapter that changes it strongly."""
    if is_int8:
        quantize_linears(model, kept=model.get_output_embeddings())
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    with no_deprecations():
        made = get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    for name, weight in made.named_parameters():
        if "lora_" in name:
            weight.data = 0.2 * torch.randn(weight.shape, generator=generator)
    return made.eval()


def gpt2() -> Any:
    config = GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128)
    return seeded(lambda: GPT2LMHeadModel(config))


def mistral() -> Any:
    return seeded(lambda: make("Mistral", vocab_size=VOCABULARY, sliding_window=8))


def mamba() -> Any:
    config = MambaConfig(vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=4)
    return seeded(lambda: MambaForCausalLM(config))


KINDS = {
    "plain": lambda: Kind(qwen()),
    "native": lambda: Kind(qwen(**NATIVE_SIZES)),
    "int8": lambda: Kind(qwen(), "int8", is_exact=False),
    "adapter": lambda: Kind(adapted(qwen())),
    "native, adapter": lambda: Kind(adapted(qwen(**NATIVE_SIZES))),
    "adapter on int8": lambda: Kind(adapted(qwen(), is_int8=True), is_exact=False),
    "native, adapter on int8": lambda: Kind(
        adapted(qwen(**NATIVE_SIZES), is_int8=True), is_exact=False
    ),
    "dropout of attention": lambda: Kind(qwen(attention_dropout=0.5), packs=False),
    "adapter, not packed": lambda: Kind(adapted(qwen(attention_dropout=0.5)), packs=False),
    "GPT-2": lambda: Kind(gpt2(), packs=False),
    "a window of attention": lambda: Kind(mistral(), packs=False),
    "Mamba": lambda: Kind(mamba(), packs=False),
}


DAILY = ("plain", "native", "int8", "adapter", "GPT-2")
OTHERS = pytest.mark.nightly(
    part="episodes", catches="a kind of model whose turns differ in a batch from those alone"
)


@pytest.mark.parametrize(
    "name",
    mostly_slow(
        [pytest.param(name, marks=() if name in DAILY else OTHERS) for name in KINDS],
        but=("plain",),
    ),
)
def test_dialogues_are_those_of_the_model_whatever_is_in_the_batch(name, tmp_path):
    kind = KINDS[name]()
    assert can_pack(kind.model) == kind.packs
    kind.model.train()
    kept: dict[str, Any] = KEPT_ACTIVATIONS
    config = GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to=[], **kept)
    tokenizer = tiny.tokenizer()
    sampler = Sampler(
        kind.model, tokenizer, config, rollout_dtype=kind.rollout_dtype, keeps_logps=True
    )

    def play(most_sequences: int, plans: Any) -> Any:
        how: dict[str, Any] = {"stop": (), "most_sequences": most_sequences}
        with sampler.dialogues(tokenizer, **how) as dialogues:
            return played(dialogues, plans)

    together = play(8, PLANS)
    if kind.is_exact:
        check(together, PLANS, kind.model.eval(), sampler.ends)
        kind.model.train()
    few = exact(play(2, PLANS))
    alone = {key: exact(play(8, {key: plan}))[key] for key, plan in PLANS.items()}
    assert exact(together) == few == alone
    assert kind.model.training
