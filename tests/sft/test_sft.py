"""The SFT kind: rows that are read or refused, training that learns, exact resume."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest
import sft_jobs
import tiny
import torch
from breadth import packed_and_padded
from grpo_jobs import same_weights, steps, weights
from sft_jobs import message, spec, write

from warmd.jobs import spec_class
from warmd.jobs.data.lengths import Lengths, truncation_warning
from warmd.jobs.data.templates import MATH
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.sft.dataset import Source
from warmd.jobs.sft.kind import run
from warmd.jobs.sft.options import SftSpec

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def chatty(folder: Path, warm: Any = None) -> tiny.Surroundings:
    job = tiny.surroundings(folder, tiny.model(positions=128) if warm is None else warm)
    job.ctx.models.tokenizer.chat_template = sft_jobs.TEMPLATE  # type: ignore[attr-defined]
    return job


# Options.


def test_every_option_has_help_and_comes_back_from_json(tmp_path):
    assert spec_class("sft") is SftSpec
    assert all(info.help for info in SftSpec.options().values())
    made = spec(tmp_path)
    assert SftSpec.parse(made.to_json()) == made


def test_the_command_line_can_read_the_options_without_torch():
    code = "import sys, warmd.jobs.sft.options as g; g.SftSpec.options()"
    code += "; print('torch' in sys.modules, 'transformers' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert child.stdout == "False False\n", child.stderr


@pytest.mark.parametrize(
    ("options", "samples", "steps_total"),
    [
        ({}, 14, 7),
        ({"batch_size": 4}, 14, 4),
        ({"batch_size": 4, "eval_samples": 6, "epochs": 2}, 8, 4),
        ({"samples": 5, "gradient_accumulation": 2}, 5, 2),
        ({"steps": 3}, 14, 3),
    ],
)
def test_rows_are_counted_when_the_job_is_submitted(tmp_path, options, samples, steps_total):
    made = spec(tmp_path, **options)
    assert (made.samples, made.steps_total) == (samples, steps_total)


def test_a_checkpoint_of_an_earlier_version_knows_its_rows(tmp_path):
    chat = [message("user", "q"), message("assistant", "ä")]
    rows = [
        {"prompt": "a", "completion": "b"},
        {"messages": chat},
        {"question": "1+1?", "answer": 2},
        {"text": "t"},
    ]
    path = write(tmp_path / "rows.jsonl", rows)
    source = Source(dataset=path, samples=3, eval_samples=1, template=MATH)
    # By the first version with SFT: a digest that moves refuses the resume of all jobs before.
    digest = "1d572afbe73e16bc021318aaf655997b80e7df93be041b28cd66f72a79211cb4"
    assert source.load().fingerprint == digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": None}, "dataset: must be given: a JSONL, CSV or Parquet file"),
        (
            {"template": "none"},
            "template: must be as-is, math, qa, or contain {question}, got 'none'",
        ),
        ({"eval_every": 5}, "eval_every: must go with eval_samples above 0 or eval_dataset, got 5"),
        (
            {"keep_best": "eval_loss"},
            "keep_best: must go with eval_samples above 0 or eval_dataset, got eval_loss",
        ),
        ({"keep_best": "reward"}, "keep_best: must be one of loss, eval_loss"),
    ],
)
def test_options_that_do_not_fit_together_are_refused_by_name(tmp_path, options, message):
    with pytest.raises(SpecError) as caught:
        spec(tmp_path, **options)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 20}, "samples: must be at most 14 (the rows of"),
        ({"samples": 10, "eval_samples": 5}, "samples: must be at most 9 (the rows of"),
        ({"eval_samples": 14}, "eval_samples: must be below 14 (the rows of"),
        ({"max_length": 100}, "max_length: must be at most 64 (the positions of demo), got 100"),
        ({"system": "brief"}, "system: must go with prompts or chats, got only texts"),
    ],
)
def test_inputs_that_cannot_work_are_refused_before_they_are_queued(tmp_path, options, message):
    with pytest.raises(SpecError) as caught:
        spec(tmp_path, **options).check_inputs({"max_position_embeddings": 64})
    assert str(caught.value).startswith(message)


# Rows.

USER, ASSISTANT = message("user", "hi"), message("assistant", "ho")

BAD_ROWS: list[tuple[Any, str]] = [
    (
        {"prompt": "a"},
        ": must be an object with a completion for its prompt, got the keys ['prompt']",
    ),
    ({"prompt": "a", "completion": " "}, ": completion: must be text, got an empty one"),
    ({"prompt": [USER], "completion": "ho"}, ": completion: must be chat messages, got text"),
    (
        {"prompt": [USER], "completion": []},
        ": completion: must be chat messages, got an empty list",
    ),
    ({"question": "a"}, ": must be an object with an answer for its question, got the keys"),
    ({"question": "a", "answer": ""}, ": answer: must be text, got an empty one"),
    ({"text": 3}, ": text: must be text, got a number"),
    ({"messages": []}, ": messages: must be chat messages, got an empty list"),
    (
        {"messages": [ASSISTANT, USER]},
        ": messages[1]: role: must be assistant, for the last message, got user",
    ),
    (
        {"messages": [USER, {"role": "assistant", "content": ""}]},
        ": messages[1]: content: must be text, got an empty one",
    ),
    (
        {"messages": [USER, {**ASSISTANT, "weight": 2}]},
        ": messages[1]: weight: must be 1 or absent, got 2",
    ),
    (
        {"messages": [USER, {"role": "assistant", "tool_calls": []}]},
        ": messages[1]: must be an object of role and content (and, for assistant, of name, reason",
    ),
    ({"other": 1}, ": must be an object with prompt and completion, messages, question"),
    (b"{", ": must be a JSON object, got"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_ROWS, ids=[text for _, text in BAD_ROWS])
def test_a_bad_row_is_refused_by_file_line_and_field_or_skipped(tmp_path, bad, message):
    path = write(tmp_path / "rows.jsonl", [{"text": "good"}, bad, {"text": "better"}])
    with pytest.raises(SpecError) as caught:
        Source(dataset=path).load()
    assert str(caught.value).startswith(f"dataset: {path}, line 2{message}")
    rows = Source(dataset=path, skip_bad_rows=True).load()
    assert [row.learned for row in rows.train] == ["good", "better"]
    assert (rows.reading.num_skipped, rows.reading.first_fault) == (1, str(caught.value))


def test_a_prompt_may_be_empty_unless_it_becomes_a_message(tmp_path):
    rows = [{"prompt": "", "completion": "a"}]
    (row,) = Source(dataset=write(tmp_path / "rows.jsonl", rows)).load().train
    assert (row.prompt, row.learned) == ("", "a")
    with pytest.raises(SpecError, match="prompt: must be text, got an empty one"):
        Source(dataset=str(tmp_path / "rows.jsonl"), chat_template=True).load()


def test_a_file_of_nothing_but_bad_rows_is_refused(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"text": ""}, {"text": ""}])
    with pytest.raises(
        SpecError, match=r"must have a row to learn from, got .*2 bad rows, the first"
    ):
        Source(dataset=path, skip_bad_rows=True).load()


def test_questions_are_inserted_into_the_template_and_into_chats_on_request(tmp_path):
    path = write(tmp_path / "rows.jsonl", [{"question": "1+1?", "answer": 2}])
    (row,) = Source(dataset=path, template="Q: {question}\nA:").load().train
    assert (row.prompt, row.learned) == ("Q: 1+1?\nA:", " 2")
    source = Source(dataset=path, template="{question}", chat_template=True, system="brief")
    (row,) = source.load().train
    assert row.prompt == [message("system", "brief"), message("user", "1+1?")]
    assert row.learned == [message("assistant", "2")]


# Training.


def test_what_is_not_read_and_held_out_rows_that_are_trained_on_are_reported(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"prompt": f"{n % 5}", "completion": " a", "id": n} for n in range(8)]
    write(folder / "rows.jsonl", rows)
    write(folder / "._rows.jsonl", rows)
    (folder / "rows.jsonl").write_bytes(b"\n\n" + (folder / "rows.jsonl").read_bytes())
    job = tiny.surroundings(tmp_path / "run")
    run(spec(tmp_path, dataset=str(folder), eval_samples=3, steps=1), job.ctx)
    assert job.of_type("begin")[0]["left_out"] == (
        "files: 1 hidden (._rows.jsonl); blank lines: 2; columns (records): id (8)"
    )
    [warning] = [w for w in job.of_type("warning") if "rows_shared" in w]
    assert warning["rows_shared"] == 3


def test_the_begin_event_shows_the_first_prompt_as_the_model_gets_it(tmp_path):
    path = write(tmp_path / "q.jsonl", [{"question": "a b?", "answer": "c"}] * 2)
    job = tiny.surroundings(tmp_path / "plain")
    run(spec(tmp_path, dataset=path, steps=1), job.ctx)
    assert job.of_type("begin")[0]["first_prompt"] == "a b?"
    job = chatty(tmp_path / "chat")
    run(spec(tmp_path, dataset=path, steps=1, chat_template=True), job.ctx)
    shown = job.of_type("begin")[0]["first_prompt"]
    assert "a b?" in shown
    assert shown != "a b?"


def test_training_lowers_the_loss_on_held_out_rows(tmp_path):
    job = tiny.surroundings(tmp_path)
    result = run(spec(tmp_path, eval_samples=4, epochs=6, eval_every=10), job.ctx)
    assert result["steps"] == 30
    assert result["eval_after"]["loss"] < result["eval_before"]["loss"] - 0.5
    assert 0 < result["eval_after"]["mean_token_accuracy"] <= 1
    found = [(event["phase"], event["step"], event["n"]) for event in job.of_type("eval")]
    assert found == [
        *[("before", 0, 4), ("during", 10, 4), ("during", 20, 4)],
        ("after", 30, 4),
    ]
    (begin,) = job.of_type("begin")
    assert begin["packing"]
    for event in job.of_type("step"):
        assert {"loss", "grad_norm", "learning_rate", "mean_token_accuracy", "tokens"} <= set(event)
        assert all(math.isfinite(event[name]) for name in ("loss", "grad_norm", "entropy"))
        orjson.dumps(event)


def test_lengths_and_truncated_rows_are_reported_in_an_event(tmp_path):
    job = tiny.surroundings(tmp_path)
    run(spec(tmp_path, max_length=8, steps=1), job.ctx)
    (event,) = job.of_type("lengths")
    assert event["rows"] == 14
    assert event["truncated"] > 0
    assert event["longest"] > 8
    assert event["histogram"] == {"<=32": 14}
    told = f"max_length: {event['truncated']} of 14 records are longer than 8 tokens"
    assert any(one["message"].startswith(told) for one in job.of_type("warning"))


def test_a_few_truncated_rows_need_no_warning():
    counted = Lengths(max_length=8)
    for length in (9, *[8] * 9):
        counted.add(length)
    assert truncation_warning(counted.facts()) is None
    counted.add(9)
    assert "2 of 11 records" in (truncation_warning(counted.facts()) or "")


def test_a_model_that_cannot_be_packed_is_padded_and_this_is_reported(tmp_path):
    job = tiny.surroundings(tmp_path, sft_jobs.small("gpt2"))
    run(spec(tmp_path, eval_samples=4), job.ctx)
    (begin,) = job.of_type("begin")
    assert (begin["packing"], begin["pack_tokens"]) == (False, None)


def test_chats_are_learned_by_the_assistants_turns(tmp_path):
    learned = {}
    for only in (False, True):
        job = chatty(tmp_path / str(only))
        run(spec(tmp_path, "chat", assistant_only_loss=only, steps=2), job.ctx)
        learned[only] = job.of_type("lengths")[0]["learned_tokens"]
    assert 0 < learned[True] < learned[False]


def test_an_end_of_turn_token_that_is_not_marked_gives_a_warning(tmp_path):
    unmarked = sft_jobs.TEMPLATE.replace(
        "{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ eos_token }}"
    )
    for number, template in enumerate((sft_jobs.TEMPLATE, unmarked)):
        job = chatty(tmp_path / str(number))
        job.ctx.models.tokenizer.chat_template = template  # type: ignore[attr-defined]
        run(spec(tmp_path, "chat", assistant_only_loss=True, steps=1), job.ctx)
        messages = [event["message"] for event in job.of_type("warning")]
        warning = (
            "assistant_only_loss: the chat template does not mark the end-of-turn token as what "
            "the assistant says: the model may not learn to stop"
        )
        assert messages == [warning] * number


def test_a_template_that_marks_no_assistant_fails_in_one_line(tmp_path):
    job = chatty(tmp_path)
    tokenizer: Any = job.ctx.models.tokenizer  # type: ignore[attr-defined]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(JobFailed, match=r"^assistant_only_loss: must be false for this model"):
        run(spec(tmp_path, "chat", assistant_only_loss=True), job.ctx)


def test_skipped_rows_are_counted_in_an_event(tmp_path):
    path = write(tmp_path / "bad.jsonl", [{"text": "good one"}, {"text": ""}, {"text": "other"}])
    job = tiny.surroundings(tmp_path)
    run(spec(tmp_path, dataset=path, skip_bad_rows=True), job.ctx)
    (warning,) = job.of_type("warning")
    assert warning["rows_skipped"] == 1
    assert "line 2: text: must be text" in warning["message"]


# Stop and resume.

CASES: dict[str, dict[str, Any]] = {
    "second epoch": {"epochs": 2, "batch_size": 4},
    "micro-steps": {"batch_size": 1, "gradient_accumulation": 2, "warmup_steps": 2},
    "evaluated": {"eval_samples": 4, "eval_every": 2, "keep_best": "eval_loss", "epochs": 2},
}


class PowerCut(BaseException):
    """Ends a run like a power failure: nothing more is saved."""


DAILY = (("second epoch", "packed"), ("evaluated", "padded"))
OTHERS = pytest.mark.nightly(
    part="oracles", catches="an option of training on rows that a resumed job has lost"
)


@pytest.mark.parametrize(
    ("options", "is_packed"),
    packed_and_padded(CASES, OTHERS, but=DAILY),
)
def test_a_run_that_died_resumes_bit_by_bit_where_its_checkpoint_was(tmp_path, options, is_packed):
    dropout = 0.0 if is_packed else 0.1  # which packs do not have
    job = spec(tmp_path, **options)
    whole = tiny.surroundings(tmp_path / "whole", tiny.model(dropout=dropout))
    run(job, whole.ctx)
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


def test_kill_9_in_mid_run_loses_nothing_but_the_steps_since_the_checkpoint(tmp_path):
    run(spec(tmp_path), tiny.surroundings(tmp_path / "whole").ctx)
    child = os.fork()
    if child == 0:
        job = tiny.surroundings(tmp_path / "killed")
        job.kill_at_step = 5
        run(spec(tmp_path), job.ctx)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    second = tiny.surroundings(tmp_path / "killed")
    run(spec(tmp_path), second.ctx)
    assert list(steps(second.events)) == [4, 5, 6, 7]
    assert same_weights(weights(tmp_path / "killed/model"), weights(tmp_path / "whole/model"))


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


def test_a_resume_on_other_data_is_refused(tmp_path):
    run(spec(tmp_path, steps=3), tiny.surroundings(tmp_path / "run").ctx)
    with pytest.raises(JobFailed, match=r"^dataset: its rows are not those"):
        run(spec(tmp_path, "text", steps=5), tiny.surroundings(tmp_path / "run").ctx)
