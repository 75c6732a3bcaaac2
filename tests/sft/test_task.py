"""Packed supervised fine-tuning: the same losses, gradients and weights as TRL's SFTTrainer."""

from __future__ import annotations

from typing import Any

import pytest
import sft_jobs
import torch
from breadth import mostly_slow
from peft import LoraConfig

from warmd.jobs.sequences.attention import packed_attention
from warmd.jobs.sequences.packs import Pack, split
from warmd.jobs.sequences.passes import score_pack
from warmd.jobs.sequences.sequence import Sequence as Tokens

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

ARCHITECTURES: dict[str, tuple[dict[str, Any], bool]] = {
    "llama": ({"tie_word_embeddings": False}, True),
    "qwen2": ({"tie_word_embeddings": True}, True),
    "qwen3": ({"tie_word_embeddings": True}, True),
    "gemma2": ({"query_pre_attn_scalar": 4, "sliding_window": 8}, False),
    "gpt2": ({}, False),
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "completions": ("prompt and completion", {}, {}),
    "prompts, too": ("prompt and completion", {"completion_only_loss": False}, {}),
    "whole chats": ("chat", {}, {}),
    "assistant turns": ("chat", {"assistant_only_loss": True}, {}),
    "chat prompts": ("chat prompt", {}, {}),
    "texts": ("text", {}, {}),
    "cut": ("text", {"max_length": 9}, {}),
    "no prompt": ("no prompt", {}, {}),
    "no prompt, cut": ("no prompt", {"max_length": 2}, {}),
    "micro-steps": (
        "prompt and completion",
        {},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    ),
    "AdamW": ("text", {}, {"optim": "adamw_torch_fused", "learning_rate": 1e-3}),
}


def assert_same(
    folder: Any, model: Any, case: str, *, most_tokens: int | None = None, **more: Any
) -> Any:
    form, how, options = CASES[case]
    options = options | more
    # TRL's last: arguments that are made later reset the state that its trainer uses.
    made = sft_jobs.trainer("warmd", folder, model, form, how=how, **options)
    theirs = sft_jobs.trainer("trl", folder, model, form, how=how, **options)
    if most_tokens is not None:
        made.task.scorer.most_tokens = most_tokens
    sft_jobs.assert_same_training(theirs, made, slack=2e-6)
    return made


OTHERS = pytest.mark.nightly(
    part="oracles", catches="an architecture or a form of rows whose training differs from TRL's"
)
DAILY = ("llama", "gpt2")  # one that is packed, one that is padded
EACH = [pytest.param(one, marks=() if one in DAILY else OTHERS) for one in ARCHITECTURES]


@pytest.mark.parametrize("architecture", EACH)
def test_every_architecture_trains_as_with_trl(tmp_path, architecture):
    changes, is_packed = ARCHITECTURES[architecture]
    made = assert_same(tmp_path, sft_jobs.small(architecture, **changes), "completions")
    assert (made.task.scorer.most_tokens is not None) == is_packed


@pytest.mark.slow
@pytest.mark.parametrize("architecture", EACH)
def test_every_architecture_trains_an_adapter_as_with_trl_and_peft(tmp_path, architecture):
    lora = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    changes, is_packed = ARCHITECTURES[architecture]
    model = sft_jobs.small(architecture, **changes)
    made = assert_same(tmp_path, model, "completions", lora=lora)
    assert (made.task.scorer.most_tokens is not None) == is_packed


DAILY_FORMS = ("whole chats", "assistant turns", "texts", "cut", "no prompt")


@pytest.mark.parametrize(
    "case",
    mostly_slow(
        [
            pytest.param(case, marks=() if case in DAILY_FORMS else OTHERS)
            for case in list(CASES)[1:]
        ],
        but=("whole chats", "cut"),
    ),
)
def test_every_form_of_row_trains_as_with_trl(tmp_path, case):
    assert_same(tmp_path, sft_jobs.small("qwen2", tie_word_embeddings=True), case)


@pytest.mark.parametrize("architecture", mostly_slow(["llama", "qwen3", "gpt2"], but=["llama"]))
def test_completions_without_a_prompt_train_as_with_trl(tmp_path, architecture):
    assert_same(tmp_path, sft_jobs.small(architecture), "no prompt")


@pytest.mark.parametrize("most_tokens", mostly_slow([1, 25], but=[25]))
def test_a_step_in_several_packs_gives_the_same_results(tmp_path, most_tokens):
    assert_same(tmp_path, sft_jobs.small("llama"), "texts", most_tokens=most_tokens)


def learned(ids: tuple[int, ...]) -> Tokens:
    return Tokens(ids, (0.0, *(1.0 for _ in ids[1:])))


def test_rows_of_a_pack_do_not_attend_to_each_other():
    model = sft_jobs.small("qwen3")
    draw = torch.Generator().manual_seed(0)
    rows = []
    for length in (9, 2, 14, 5):
        ids = tuple(torch.randint(3, 80, (length,), generator=draw).tolist())
        rows.append(learned(ids))
    with torch.no_grad(), packed_attention(model):
        together = score_pack(model, Pack(rows)).logps
        alone = torch.cat([score_pack(model, Pack([row])).logps for row in rows])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    padded: list[torch.Tensor] = []
    with torch.no_grad():
        for row in rows:
            alone = torch.tensor([row.tokens])
            logps = model(alone).logits.log_softmax(-1)[0, :-1]
            padded.append(logps.gather(1, alone[0, 1:, None])[:, 0])
    torch.testing.assert_close(together, torch.cat(padded), rtol=1e-5, atol=1e-5)


def test_packs_hold_what_fits_and_are_the_same_in_any_order():
    rows = [(learned((number,) * size),) for number, size in enumerate((4, 9, 6, 3))]
    packs = split(rows, 10)
    assert [[row.num_inputs for row in pack] for pack in packs] == [[8, 2], [5, 3]]
    assert split(rows[::-1], 10) == packs
    assert [len(pack) for pack in split(rows, 1)] == [1] * 4
