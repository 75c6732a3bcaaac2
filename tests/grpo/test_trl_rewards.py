"""A reward written for TRL gets the same arguments as from TRL's own GRPOTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
import torch
from breadth import mostly_slow
from datasets import Dataset
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.grpo.kind import run
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.training.arguments import KEPT_ACTIVATIONS

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
CALLS: list[dict[str, Any]] = []


@pytest.fixture(autouse=True)
def no_calls() -> None:
    CALLS.clear()


def record(completions: list[Any], **kwargs: Any) -> list[float]:
    step = kwargs["trainer_state"].global_step  # now: TRL passes one object that it changes
    CALLS.append({"completions": completions, "step": step, **kwargs})
    return [float(n) for n in range(len(completions))]


async def record_async(completions: list[Any], **kwargs: Any) -> list[float]:
    return record(completions, **kwargs)


def digits_of_answer(completions: list[str], answer: list[int], **kwargs: Any) -> list[float]:
    return [len(text) / (1 + number) for text, number in zip(completions, answer, strict=True)]


def judges_the_first(completions: list[str], **kwargs: Any) -> list[float | None]:
    return [1.0, *[None] * (len(completions) - 1)]


def judges_none(completions: list[str], **kwargs: Any) -> list[None]:
    return [None] * len(completions)


def logs(completions: list[str], log_extra: Any, log_metric: Any, **kwargs: Any) -> list[float]:
    log_extra("length", [len(text) for text in completions])
    log_metric("calls", 1.0)
    return [0.5] * len(completions)


def rows(chat: bool) -> list[dict[str, Any]]:
    texts = ["1+1=", "2+2=", "3+3="]
    prompts: list[Any] = [[{"role": "user", "content": text}] for text in texts] if chat else texts
    return [
        {"prompt": prompt, "answer": n, "tests": [f"f({n})"], "level": {"of": n}}
        for n, prompt in enumerate(prompts)
    ]


def spec(data: Path, content: list[dict[str, Any]], *rewards: str, **options: Any) -> GrpoSpec:
    data.write_bytes(b"\n".join(orjson.dumps(row) for row in content))
    small: dict[str, Any] = {
        "dataset": str(data),
        "samples": len(content),
        "num_generations": 4,
        "max_completion_length": 5,
        "reward": [f"{__name__}:{reward}" for reward in rewards],
    }
    return GrpoSpec.parse(small | options)


def of_warmd(tmp_path: Path, chat: bool, reward: str) -> list[dict[str, Any]]:
    job = tiny.surroundings(tmp_path / "run")
    job.ctx.models.tokenizer.chat_template = TEMPLATE  # type: ignore[attr-defined]
    run(spec(tmp_path / "rows.jsonl", rows(chat), reward), job.ctx)
    return list(CALLS)


def of_trl(tmp_path: Path, chat: bool) -> list[dict[str, Any]]:
    CALLS.clear()
    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = TEMPLATE
    config = GRPOConfig(
        output_dir=str(tmp_path / "trl"),
        max_steps=3,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=5,
        use_cpu=True,
        bf16=False,
        **KEPT_ACTIVATIONS,
        save_strategy="no",
        report_to=[],
        seed=42,
    )
    reward: Any = record
    trainer = GRPOTrainer(
        model=tiny.model().requires_grad_(True),
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(rows(chat)),
        reward_funcs=reward,
    )
    trainer.train()
    return list(CALLS)


def shape(call: dict[str, Any]) -> dict[str, Any]:
    """The arguments that do not depend on the completions, which two samplers draw differently."""
    seen = {k: v for k, v in call.items() if k not in ("completions", "completion_ids")}
    seen["trainer_state"] = type(call["trainer_state"])
    seen |= {name: callable(call[name]) for name in ("log_extra", "log_metric")}
    first = call["completions"][0]
    seen["form"] = (
        [(sorted(m), m["role"]) for m in first] if isinstance(first, list) else type(first)
    )
    seen["ids"] = type(call["completion_ids"][0][0])
    return seen


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of TRL's own
@pytest.mark.parametrize("chat", mostly_slow([False, True], but=[True]), ids=["text", "chat"])
@pytest.mark.parametrize("reward", mostly_slow(["record", "record_async"], but=["record_async"]))
def test_a_trl_reward_gets_the_arguments_of_trl(tmp_path, chat, reward):
    ours, theirs = of_warmd(tmp_path, chat, reward), of_trl(tmp_path, chat)
    assert len(ours) == len(theirs) == 3
    assert [shape(call) for call in ours] == [shape(call) for call in theirs]
    for call in ours:
        texts = [c[0]["content"] if chat else c for c in call["completions"]]
        decoded = tiny.tokenizer().batch_decode(call["completion_ids"], skip_special_tokens=True)
        assert texts == decoded
        assert set(call["tests"][0]) == {f"f({call['answer'][0]})"}


@pytest.mark.slow
def test_rewards_of_both_kinds_add_up(tmp_path):
    job = tiny.surroundings(tmp_path / "run")
    made = spec(tmp_path / "rows.jsonl", rows(False), "digits_of_answer", eval_samples=0)
    result = run(
        GrpoSpec.parse({**made.to_json(), "reward": [*made.reward, "tiny:digit_share"]}), job.ctx
    )
    for event in job.of_type("step"):
        assert event["reward"] == pytest.approx(sum(event["rewards"].values()), abs=1e-6)
    assert result["steps"] == 3


@pytest.mark.slow
def test_completions_without_a_score_have_no_effect(tmp_path):
    job = tiny.surroundings(tmp_path / "run")
    result = run(spec(tmp_path / "rows.jsonl", rows(False), "judges_the_first"), job.ctx)
    assert [event["reward"] for event in job.of_type("step")] == [1.0] * 3
    assert [event["message"] for event in job.of_type("warning")] == [
        "reward: 3 of 4 completions have no score from any reward and are left out, the first one "
        "of row 1"
    ]
    job = tiny.surroundings(tmp_path / "none")
    options: dict[str, Any] = {"samples": 2, "eval_samples": 1}
    result = run(spec(tmp_path / "rows.jsonl", rows(False), "judges_none", **options), job.ctx)
    assert result["reward_after"] != result["reward_after"]
    for event in job.of_type("eval"):
        assert (event["n"], event["unscored"], event["completions"]) == (0, 1, 1)
    messages = [event["message"] for event in job.of_type("warning")]
    assert "the held-out reward is unknown: no reward scores any of 1 completions" in messages
    before = tiny.model().state_dict()
    trained: Any = type(tiny.model()).from_pretrained(tmp_path / "none" / "model")
    assert all(torch.equal(before[k], v) for k, v in trained.state_dict().items())


def logs_names_of_the_training(
    completions: list[str], log_metric: Any, **kwargs: Any
) -> list[float]:
    for name in ("loss", "parts", "kl", "entropy", "reward", "frac_reward_zero_std", "seconds"):
        log_metric(name, 100.0)
    return tiny.digit_share([], completions, [])


def does_not_log(completions: list[str], **kwargs: Any) -> list[float]:
    return tiny.digit_share([], completions, [])


def test_what_a_reward_logs_never_takes_the_place_of_a_metric_of_the_training(tmp_path):
    found = []
    for reward in ("does_not_log", "logs_names_of_the_training"):
        job = tiny.surroundings(tmp_path / reward)
        run(spec(tmp_path / "rows.jsonl", rows(False), reward), job.ctx)
        names = ("loss", "kl", "entropy", "reward", "clip_ratio")
        found.append([[step[name] for name in names] for step in job.of_type("step")])
    assert found[0] == found[1]
    assert [event["message"] for event in job.of_type("warning")] == [
        "reward: log_metric cannot record entropy, a metric of the training: choose another name"
    ]


@pytest.mark.slow
def test_values_that_a_reward_logs_in_an_evaluation_are_not_in_a_step(tmp_path):
    job = tiny.surroundings(tmp_path / "run")
    options: dict[str, Any] = {"samples": 2, "eval_samples": 1}
    result = run(spec(tmp_path / "rows.jsonl", rows(False), "logs", **options), job.ctx)
    assert result["reward_before"] == result["reward_after"] == 0.5
    messages = [event["message"] for event in job.of_type("warning")]
    assert [one for one in messages if "log_extra" in one] == [
        "reward: the column length of log_extra is not recorded; log_metric is, by the trackers "
        "of report_to"
    ]


def test_a_column_that_the_data_lacks_is_refused_before_it_is_queued(tmp_path):
    made = spec(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}], "digits_of_answer")
    with pytest.raises(SpecError, match="the parameter answer must be a column of the data"):
        made.check_inputs(None)


@pytest.mark.slow
def test_a_resume_on_rows_with_other_columns_is_refused(tmp_path):
    content = rows(False)
    run(
        spec(tmp_path / "rows.jsonl", content, "record", steps=2),
        tiny.surroundings(tmp_path / "r").ctx,
    )
    content[1]["tests"] = ["another"]
    with pytest.raises(JobFailed, match=r"^dataset: its rows are not those"):
        run(
            spec(tmp_path / "rows.jsonl", content, "record", steps=3),
            tiny.surroundings(tmp_path / "r").ctx,
        )


@pytest.mark.slow
def test_columns_may_differ_from_row_to_row(tmp_path):
    content: list[dict[str, Any]] = [{"prompt": "a", "x": 1}, {"prompt": "b", "x": "one", "y": []}]
    run(spec(tmp_path / "rows.jsonl", content, "record"), tiny.surroundings(tmp_path / "run").ctx)
    seen = {call["prompts"][0]: (call["x"][0], call["y"][0]) for call in CALLS}
    assert seen == {"a": (1, None), "b": ("one", [])}
