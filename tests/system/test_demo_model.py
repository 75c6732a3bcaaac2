"""The demo model: it loads without warnings, adds as badly as its card says, and learns."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import make_demo_model as maker
import pytest
import torch
from tiny import surroundings
from transformers import AutoModelForCausalLM, AutoTokenizer

import warmd.configs
from warmd.jobs.rewards.problems import Problem, iter_arithmetic

FOLDER = Path(warmd.configs.__file__).parent / "demo"
HELD_OUT = list(iter_arithmetic("eval"))[:100]


pytestmark = pytest.mark.usefixtures("like_a_work_horse")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER)


def answers(model: Any, tokenizer: Any, problems: list[Problem], **sampling: Any) -> list[str]:
    """The completion of each prompt, up to the end-of-sequence token."""
    batch = tokenizer([p.prompt for p in problems], return_tensors="pt", padding=True)
    ids = model.generate(**batch, **sampling)[:, batch["input_ids"].shape[1] :]
    texts: list[str] = tokenizer.batch_decode(ids, skip_special_tokens=True)
    return texts


def accuracy(said: list[str], problems: list[Problem]) -> float:
    right = sum(text == p.answer for text, p in zip(said, problems, strict=True))
    return right / len(problems)


def test_the_demo_model_loads_pads_and_generates_without_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("transformers")  # it does not hand its records on to the root
    logger.addHandler(caplog.handler)
    try:
        tokenizer = AutoTokenizer.from_pretrained(FOLDER)
        model = AutoModelForCausalLM.from_pretrained(FOLDER)
        answers(model, tokenizer, HELD_OUT[:10])
        answers(model, tokenizer, HELD_OUT[:10], do_sample=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_text_survives_the_tokenizer(tokenizer: Any) -> None:
    for text in ("17+58=", maker.CHARACTERS, " two  spaces , and\n\na line "):
        ids = tokenizer(text)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.decode(ids) == text


def test_an_unknown_character_is_one_unknown_token(tokenizer: Any) -> None:
    assert tokenizer("7é日")["input_ids"][1:] == [tokenizer.unk_token_id] * 2


def test_the_folder_of_the_demo_model_is_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 1_500_000


@pytest.mark.slow
def test_before_training_four_in_ten_sampled_answers_are_right(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    problems = HELD_OUT * 8
    said = answers(model, tokenizer, problems, do_sample=True, temperature=1.0)
    assert 0.35 <= accuracy(said, problems) <= 0.5


def test_before_training_two_in_three_greedy_answers_are_right(model: Any, tokenizer: Any) -> None:
    said = answers(model, tokenizer, HELD_OUT)
    assert 0.55 <= accuracy(said, HELD_OUT) <= 0.8


def test_answers_of_the_demo_model_end_with_the_end_token(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    said = answers(model, tokenizer, HELD_OUT, do_sample=True)
    assert all(text.isdigit() and len(text) <= 3 for text in said)


def test_padding_does_not_change_an_answer(model: Any, tokenizer: Any) -> None:
    together = answers(model, tokenizer, HELD_OUT[:10])
    assert together == [answers(model, tokenizer, [problem])[0] for problem in HELD_OUT[:10]]


def test_the_demo_model_was_not_trained_on_held_out_sums() -> None:
    taught = {f"{a}+{b}=" for a, b in maker.lesson_sums()}
    turned = {f"{b}+{a}=" for a, b in maker.lesson_sums()}
    held_out = {problem.prompt for problem in iter_arithmetic("eval")}
    assert held_out.isdisjoint(taught | turned)
    assert len(taught) > 8000


@pytest.mark.slow
def test_making_the_demo_model_again_takes_the_same_steps(model: Any, tokenizer: Any) -> None:
    def first_steps() -> dict[str, torch.Tensor]:
        pupil = maker.make_model(tokenizer, seed=0)
        maker.learn(
            pupil,
            tokenizer,
            maker.lesson_sums(),
            maker.careless,
            steps=3,
            learning_rate=1e-3,
            seed=1,
        )
        return dict(pupil.state_dict())

    first, second = first_steps(), first_steps()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert {n: w.shape for n, w in first.items()} == {
        n: w.shape for n, w in model.state_dict().items()
    }


def test_the_demo_model_made_again_has_the_same_tokenizer_and_config(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    made = maker.make_tokenizer()
    maker.save(maker.make_model(made, seed=0), made, tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.config.to_diff_dict() == model.config.to_diff_dict()
    assert again.generation_config.to_diff_dict() == model.generation_config.to_diff_dict()
    assert (tmp_path / "tokenizer.json").read_text() == (FOLDER / "tokenizer.json").read_text()


@pytest.mark.slow
def test_eighty_steps_with_the_default_options_teach_unseen_sums(
    model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    from warmd.jobs.grpo.kind import run
    from warmd.jobs.grpo.options import GrpoSpec

    around = surroundings(tmp_path / "run", model)
    around.ctx.models.tokenizer = tokenizer  # type: ignore[attr-defined]
    result = run(GrpoSpec.parse({"eval_samples": 400}), around.ctx)

    assert result["steps"] == 80
    assert result["reward_before"] < 0.5
    assert result["reward_after"] - result["reward_before"] >= 0.15
