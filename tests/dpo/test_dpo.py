"""The DPO kind: pairs that are read or refused, training that learns, exact resume."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import dpo_jobs
import numpy as np
import pytest
import sft_jobs
import tiny
import torch
from breadth import packed_and_padded
from dpo_jobs import spec
from grpo_jobs import same_weights, steps, weights
from old_checkpoints import written_by_an_earlier_version
from sft_jobs import message, write

from warmd.jobs import spec_class
from warmd.jobs.dpo.dataset import Example, Source
from warmd.jobs.dpo.kind import run
from warmd.jobs.dpo.options import REWARDS, DpoSpec
from warmd.jobs.errors import JobFailed, SpecError, Stopped

pytestmark = pytest.mark.usefixtures("like_a_work_horse")

# Options.


def test_every_option_has_help_and_comes_back_from_json(tmp_path):
    assert spec_class("dpo") is DpoSpec
    assert all(info.help for info in DpoSpec.options().values())
    made = spec(tmp_path)
    assert DpoSpec.parse(made.to_json()) == made
    assert (made.samples, made.steps_total) == (14, 7)


def test_the_command_line_can_read_the_options_without_torch():
    code = "import sys, warmd.jobs.dpo.options as g; g.DpoSpec.options()"
    code += "; print('torch' in sys.modules, 'transformers' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout == "False False\n", child.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": None}, "dataset: must be given: a JSONL, CSV or Parquet file"),
        ({"beta": 0}, "beta: must be a number above 0 and at most 1000, got 0"),
        ({"loss_type": "sft"}, "loss_type: must be one of sigmoid, hinge"),
        (
            {"label_smoothing": 0.1},
            "label_smoothing: must go with loss_type exo_pair, robust, aot or aot_unpaired, got "
            "0.1 with loss_type sigmoid",
        ),
        (
            {"loss_type": "exo_pair", "label_smoothing": 0},
            "label_smoothing: must not be 0 with loss_type exo_pair, got 0",
        ),
        (
            {"loss_type": "robust", "label_smoothing": 0.5},
            "label_smoothing: must be a number of at least 0 and at most 0.499, got 0.5",
        ),
        (
            {"keep_best": "eval_rewards/margins"},
            "keep_best: must go with eval_samples above 0 or eval_dataset, got eval_rewards",
        ),
        ({"keep_best": "reward"}, "keep_best: must be one of loss, eval_loss, rewards/chosen"),
    ],
)
def test_options_that_do_not_fit_together_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(SpecError) as caught:
        spec(tmp_path, **options)
    assert str(caught.value).startswith(message)


# Pairs.

USER, GOOD, BAD = message("user", "hi"), message("assistant", "ho"), message("assistant", "hm")
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}
OPENAI = {
    "input": {"messages": [USER]},
    "preferred_output": [GOOD],
    "non_preferred_output": [BAD],
}


def without(row: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != name}


BAD_ROWS: list[tuple[Any, str]] = [
    (without(PAIR, "prompt"), ": must be an object with a prompt, got the keys"),
    (without(PAIR, "chosen"), ": must be an object with prompt, chosen and rejected, got the keys"),
    (
        without(PAIR, "rejected"),
        ": must be an object with prompt, chosen and rejected, got the keys",
    ),
    ({**PAIR, "prompt": 1}, ": prompt: must be text, got a number"),
    ({**PAIR, "chosen": ""}, ": chosen: must be text, got an empty one"),
    ({**PAIR, "rejected": " "}, ": rejected: must be text, got an empty one"),
    ({**PAIR, "rejected": 5}, ": rejected: must be text, got a number"),
    ({**PAIR, "rejected": "b"}, ": rejected: must be another completion than chosen, got the same"),
    ({**PAIR, "chosen": [GOOD]}, ": chosen: must be text, got a list"),
    (
        {"prompt": [USER], "chosen": [USER], "rejected": [BAD]},
        ": chosen[0]: role: must be assistant, for the last message, got user",
    ),
    (
        {"prompt": [USER], "chosen": [GOOD], "rejected": []},
        ": rejected: must be chat messages, got an empty list",
    ),
    (
        {"prompt": [USER], "chosen": [GOOD], "rejected": [GOOD]},
        ": rejected: must be another completion than chosen, got the same",
    ),
    (
        {"chosen": [USER, GOOD], "rejected": [message("user", "yo"), BAD]},
        ": rejected: must be a chat that begins as chosen does, got another first message",
    ),
    (
        {"chosen": [USER, GOOD, USER, GOOD], "rejected": [USER, GOOD]},
        ": rejected: must be a chat that ends otherwise than chosen, got a part of it",
    ),
    (
        without(OPENAI, "preferred_output"),
        ": must be an object with input, preferred_output and non_preferred_output, got the keys",
    ),
    (
        {**OPENAI, "input": {"messages": [USER], "seed": 1}},
        ": input: must be an object of messages, tools and parallel_tool_calls, got the keys"
        " ['messages', 'seed']",
    ),
    (
        {**OPENAI, "non_preferred_output": [GOOD]},
        ": non_preferred_output: must be another completion than preferred_output, got the same",
    ),
    (b"{", ": must be a JSON object, got"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS, ids=[text for _, text in BAD_ROWS])
def test_a_bad_pair_is_refused_by_file_line_and_field_or_skipped(tmp_path, bad, message):
    path = write(tmp_path / "rows.jsonl", [PAIR, bad, PAIR])
    with pytest.raises(SpecError) as caught:
        Source(dataset=path).load()
    assert str(caught.value).startswith(f"dataset: {path}, line 2{message}")
    rows = Source(dataset=path, skip_bad_rows=True).load()
    assert [row.chosen for row in rows.train] == ["b", "b"]
    assert (rows.reading.num_skipped, rows.reading.first_fault) == (1, str(caught.value))


def test_a_prompt_may_be_empty_unless_it_becomes_a_message(tmp_path):
    (pair,) = Source(dataset=write(tmp_path / "rows.jsonl", [{**PAIR, "prompt": ""}])).load().train
    assert pair.prompt == ""
    with pytest.raises(SpecError, match="prompt: must be text, got an empty one"):
        Source(dataset=str(tmp_path / "rows.jsonl"), chat_template=True).load()


def test_chats_are_the_same_pair_in_every_form(tmp_path):
    forms = [
        {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]},
        {"chosen": [USER, GOOD], "rejected": [USER, BAD]},
        OPENAI,
    ]
    rows = Source(dataset=write(tmp_path / "rows.jsonl", forms)).load().train
    assert [row.content for row in rows] == [[[USER], [GOOD], [BAD]]] * 3
    path = write(tmp_path / "texts.jsonl", [{"prompt": "hi", "chosen": "ho", "rejected": "hm"}])
    (row,) = Source(dataset=path, chat_template=True, system="brief").load().train
    assert row.content == [[message("system", "brief"), USER], [GOOD], [BAD]]


# Training.


def test_training_prefers_the_chosen_completions(tmp_path):
    job = tiny.surroundings(tmp_path)
    options: dict[str, Any] = {"eval_samples": 4, "epochs": 3, "eval_every": 10}
    result = run(spec(tmp_path, **options), job.ctx)
    before, *_, after = job.of_type("eval")
    assert (before["phase"], before["loss"]) == ("before", pytest.approx(math.log(2)))
    assert [before[name] for name in REWARDS] == [0, 0, 0, 0]
    assert after["rewards/margins"] > 0.5
    assert after["rewards/accuracies"] >= 0.75
    assert after["loss"] < before["loss"]
    assert result["eval_after"] == {name: after[name] for name in ("loss", *REWARDS, "n")}
    last = job.of_type("step")[-1]
    assert last["rewards/margins"] == pytest.approx(
        last["rewards/chosen"] - last["rewards/rejected"], abs=1e-5
    )


def test_the_warm_model_is_not_changed(tmp_path):
    job = tiny.surroundings(tmp_path)
    run(spec(tmp_path), job.ctx)
    warm: Any = job.ctx.models.warm  # type: ignore[attr-defined]
    assert same_weights(dict(warm.state_dict()), dict(tiny.model().state_dict()))


def test_chats_are_rendered_by_the_template(tmp_path):
    job = tiny.surroundings(tmp_path, tiny.model(positions=128))
    job.ctx.models.tokenizer.chat_template = sft_jobs.TEMPLATE  # type: ignore[attr-defined]
    run(spec(tmp_path, "chats", steps=2), job.ctx)
    assert len(job.of_type("step")) == 2


def test_pairs_whose_prompt_fills_the_length_are_dropped_and_counted(tmp_path):
    rows = [PAIR, {**PAIR, "prompt": "a" * 20}, {**PAIR, "chosen": "b" * 20}]
    job = tiny.surroundings(tmp_path)
    path = write(tmp_path / "long.jsonl", rows)
    run(spec(tmp_path, dataset=path, max_length=10, steps=1), job.ctx)
    (lengths,) = job.of_type("lengths")
    assert (lengths["rows"], lengths["truncated"], lengths["dropped"]) == (3, 2, 1)
    short = tiny.surroundings(tmp_path / "short")
    with pytest.raises(JobFailed, match=r"^max_length: must leave a token to learn"):
        run(spec(tmp_path, dataset=write(tmp_path / "a", rows[1:2]), max_length=10), short.ctx)


@pytest.mark.slow
def test_dropout_of_the_adapter_is_used_in_training_alone(tmp_path):
    found = {}
    for dropout in (0.0, 0.5):
        job = tiny.surroundings(tmp_path / str(dropout))
        options: dict[str, Any] = {
            "lora": 4,
            "lora_dropout": dropout,
            "eval_samples": 4,
            "steps": 3,
        }
        run(spec(tmp_path, **options), job.ctx)
        found[dropout] = job.of_type("step"), job.of_type("eval")
    without, with_dropout = found.values()
    # The adapter begins with zeros, so the first loss is the same, and its gradient is not.
    assert with_dropout[0][0]["loss"] == pytest.approx(without[0][0]["loss"])
    assert with_dropout[0][0]["grad_norm"] != pytest.approx(without[0][0]["grad_norm"], rel=1e-3)
    assert with_dropout[1][0]["loss"] == without[1][0]["loss"]


@pytest.mark.slow
def test_a_resume_from_an_earlier_versions_checkpoint_says_what_changes_from_which_step(tmp_path):
    def said(stop_at: int) -> list[str]:
        job = tiny.surroundings(tmp_path)
        job.stop_at_step = stop_at
        with pytest.raises(Stopped):
            run(spec(tmp_path, lora=2, lora_dropout=0.1, learning_rate=1e-3), job.ctx)
        return [event["message"] for event in job.of_type("warning")]

    assert not said(2)
    assert not said(3)
    written_by_an_earlier_version(tmp_path / "checkpoints" / "checkpoint-4")
    (message,) = said(6)
    assert message.startswith("from step 5 on, results differ from those of the")
    assert "that wrote checkpoint-4: every completion of one token" in message
    assert "lora_dropout has an effect" in message


def test_nan_in_the_weights_fails_the_job_before_a_step(tmp_path):
    model = tiny.model()
    model.model.norm.weight.data[0] = math.nan
    job = tiny.surroundings(tmp_path, model)
    with pytest.raises(JobFailed, match="nan"):
        run(spec(tmp_path), job.ctx)
    assert not job.of_type("step")
    assert not list((tmp_path / "checkpoints").glob("checkpoint-*"))


# Stop and resume.

CASES: dict[str, dict[str, Any]] = {
    "second epoch": {"epochs": 2, "batch_size": 4},
    "micro-steps": {"batch_size": 1, "gradient_accumulation": 2, "warmup_steps": 2},
    "evaluated": {
        **{"eval_samples": 4, "eval_every": 2, "epochs": 2},
        "keep_best": "eval_rewards/margins",
    },
}


class PowerCut(BaseException):
    """Ends a run like a power failure: nothing more is saved."""


DAILY = (("second epoch", "packed"), ("evaluated", "padded"))
OTHERS = pytest.mark.nightly(
    part="oracles", catches="an option of training on pairs that a resumed job has lost"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "is_packed"),
    packed_and_padded(CASES, OTHERS, but=DAILY),
)
def test_a_run_that_died_resumes_bit_by_bit_where_its_checkpoint_was(tmp_path, options, is_packed):
    dropout = 0.0 if is_packed else 0.1  # which packs do not have
    job = spec(tmp_path, **options)
    whole = tiny.surroundings(tmp_path / "whole", tiny.model(dropout=dropout))
    run(job, whole.ctx)
    assert whole.of_type("begin")[0]["packing"] == is_packed
    first = tiny.surroundings(tmp_path / "died", tiny.model(dropout=dropout))
    first.raise_at_step[4] = PowerCut()
    with pytest.raises(PowerCut):
        run(job, first.ctx)
    second = tiny.surroundings(tmp_path / "died", tiny.model(dropout=dropout))
    torch.rand(7)  # another process has used up randomness differently
    run(job, second.ctx)
    assert second.of_type("begin")[0]["resumed_from"] == 3
    again, expected = steps(second.events), steps(whole.events)
    assert list(again) == list(range(4, max(expected) + 1))
    assert again == {step: expected[step] for step in again}
    assert same_weights(weights(tmp_path / "died" / "model"), weights(tmp_path / "whole" / "model"))


def test_a_stop_saves_at_the_steps_end_and_the_resume_continues_from_there(tmp_path):
    job = spec(tmp_path, eval_samples=4)
    first = tiny.surroundings(tmp_path / "run")
    first.stop_at_step = 2
    with pytest.raises(Stopped):
        run(job, first.ctx)
    second = tiny.surroundings(tmp_path / "run")
    result = run(job, second.ctx)
    assert [event["phase"] for event in second.of_type("eval")] == ["after"]
    assert result["eval_before"]["n"] == 4
    again = tiny.surroundings(tmp_path / "run")
    assert run(job, again.ctx) == result
    assert not again.of_type("step")


@pytest.mark.slow
def test_a_resume_on_other_pairs_is_refused(tmp_path):
    run(spec(tmp_path, steps=3), tiny.surroundings(tmp_path / "run").ctx)
    longer = spec(tmp_path, steps=5)
    write(tmp_path / "rows.jsonl", dpo_jobs.ROWS["texts"][::-1])
    with pytest.raises(JobFailed, match=r"^dataset: its rows are not those"):
        run(longer, tiny.surroundings(tmp_path / "run").ctx)


@pytest.mark.slow
def test_pairs_of_a_table_are_tokenized_once(tmp_path):
    table = tmp_path / "pairs.csv"
    table.write_text("question,good,bad\n" + "".join(f"{n}+1=,{n + 1},no\n" for n in range(6)))
    columns = ["prompt=question,chosen=good,rejected=bad"]
    cached = []
    for name in ("one", "two"):
        job = tiny.surroundings(tmp_path / name)
        run(spec(tmp_path, dataset=str(table), columns=columns, eval_samples=2), job.ctx)
        cached += [(event["part"], event["cached"]) for event in job.of_type("lengths")]
        assert len(job.of_type("step")) == 2
    assert cached == [("train", False), ("eval", False), ("train", True), ("eval", True)]


def test_an_example_is_read_back_from_disk_unchanged(tmp_path):
    for example in (Example([1, 2], [3], [4, 5]), Example([1], [], [2]), Example([], [1], [])):
        columns = {name: np.array(values) for name, values in example.columns().items()}
        assert Example.of_columns(columns) == example
