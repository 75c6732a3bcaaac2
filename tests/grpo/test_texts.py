"""A completion is the same text in training, evaluation, answers, samples and logs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import sft_jobs
import tiny
from breadth import mostly_slow
from grpo_jobs import rows, spec
from odd_tokenizers import LETTERS, bytewise, spaced

from warmd.jobs.eval.kind import run as evaluate
from warmd.jobs.eval.options import EvalSpec
from warmd.jobs.grpo import completions
from warmd.jobs.grpo.kind import run
from warmd.jobs.infer.kind import run as answer
from warmd.jobs.infer.options import InferSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

HEARD: list[str] = []


@pytest.fixture(autouse=True)
def nothing_heard() -> None:
    HEARD.clear()


def hears(prompts: list[str], completions: list[str], answers: list[str | None]) -> list[float]:
    """A reward that keeps the texts that it is called with."""
    HEARD.extend(completions)
    return [float(len(text)) for text in completions]


REWARD = [f"{__name__}:hears"]
TOKENIZERS = {"bytewise": bytewise, "spaced": spaced, "end token is not special": bytewise}


def job(folder: Path, case: str) -> tiny.Surroundings:
    """A job of a model that writes any tokens, with a tokenizer of which some have no text."""
    made = tiny.surroundings(folder, sft_jobs.small("llama", vocab_size=270))
    tokenizer = made.ctx.models.tokenizer = TOKENIZERS[case]()  # type: ignore[attr-defined]
    if case == "end token is not special":
        common = [*range(60, 250)]  # it is written soon
        made.ctx.models.warm.generation_config.eos_token_id = common  # type: ignore[attr-defined]
    if tokenizer.eos_token is None:
        tokenizer.add_special_tokens({"eos_token": "<eos>"})
    tokenizer.pad_token = tokenizer.eos_token
    return made


@pytest.mark.parametrize("case", mostly_slow(TOKENIZERS, but=("spaced",)))
def test_held_out_completions_are_the_same_text_in_grpo_eval_and_answers(tmp_path, case):
    content = [{"prompt": letter, "answer": "1"} for letter in LETTERS.strip()]
    data = rows(tmp_path / "rows.jsonl", *content)
    options: dict[str, Any] = {"reward": REWARD, "dataset": data, "max_completion_length": 9}
    trained = job(tmp_path / "trained", case)
    run(
        spec(**options, samples=2, eval_samples=8, steps=1, top_k=1, learning_rate=1e-9),
        trained.ctx,
    )
    in_training = HEARD[:8]  # the evaluation before the first step
    evaluated = job(tmp_path / "evaluated", case)
    measured = {"samples": 10, "max_tokens": 9, "dataset": data}
    evaluate(EvalSpec.parse(measured).located(tmp_path), evaluated.ctx)
    lines = (evaluated.ctx.run_dir / "rows.jsonl").read_bytes().splitlines()
    texts = [orjson.loads(line)["completions"][0]["text"] for line in lines]
    assert in_training == texts[2:]
    assert len(set(texts)) > 1
    for row, text in zip(content[2:4], in_training, strict=False):
        answered = job(tmp_path / row["prompt"], case)
        asked = {"prompt": row["prompt"], "max_tokens": 9, "temperature": 0}
        (choice,) = answer(InferSpec.parse(asked), answered.ctx)["choices"]
        assert choice["text"] == text


@pytest.mark.slow
@pytest.mark.parametrize("case", TOKENIZERS)
def test_kept_completions_are_the_texts_that_were_rewarded(tmp_path, case):
    data = rows(tmp_path / "rows.jsonl", *({"prompt": letter} for letter in "abc"))
    trained = job(tmp_path / "trained", case)
    options = {"reward": REWARD, "dataset": data, "samples": 3}
    run(spec(**options), trained.ctx)
    lines = list(completions.read(trained.ctx.run_dir / completions.FILE))
    assert [line["completion"] for line in lines] == HEARD
    assert [len(text) for text in HEARD] == [sum(line["rewards"].values()) for line in lines]
    shown = [sample for event in trained.of_type("step") for sample in event["samples"]]
    assert [sample["completion"] for sample in shown] == [
        HEARD[i] for i in range(len(HEARD)) if i % 4 < 2
    ]
