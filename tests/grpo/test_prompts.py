"""Prompts of GRPO jobs: lengths, chat templates, records that cannot be used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import tool_chats
from grpo_jobs import rows, spec

from warmd.jobs.errors import JobFailed, SpecError
from warmd.jobs.grpo.kind import run
from warmd.jobs.models import chat_templates
from warmd.jobs.models.vocabulary import Vocabulary
from warmd.jobs.rewards.problems import fingerprint, load
from warmd.jobs.rewards.prompts import encode

pytestmark = pytest.mark.usefixtures("like_a_work_horse")


def test_a_prompt_that_is_too_long_fails_by_its_row(tmp_path):
    data = rows(tmp_path / "data.jsonl", {"prompt": "short"}, {"prompt": "long" * 20})
    with pytest.raises(JobFailed, match=r"^max_prompt_length: the prompt of row 2 has 80 tokens"):
        run(spec(samples=2, dataset=data), tiny.surroundings(tmp_path / "run").ctx)


def test_a_prompt_is_cut_from_the_left_on_request_and_reported(tmp_path):
    data = rows(tmp_path / "data.jsonl", {"prompt": "short"}, {"prompt": "long" * 20})
    job = tiny.surroundings(tmp_path / "run")
    run(spec(samples=2, dataset=data, max_prompt_length=10), job.ctx)
    assert [event["prompts"] for event in job.of_type("truncated")] == [1]
    tokens = {event["samples"][0]["prompt"]: event["tokens"] for event in job.of_type("step")}
    assert tokens["long" * 20] <= 4 * (10 + 6)


@pytest.mark.slow
def test_without_a_length_completions_take_what_the_longest_prompt_leaves(tmp_path):
    data = rows(tmp_path / "data.jsonl", {"prompt": "x" * 60}, {"prompt": "short"})
    job = tiny.surroundings(tmp_path / "run")
    run(spec(samples=2, dataset=data, max_completion_length=None), job.ctx)
    assert job.of_type("begin")[0]["max_completion_length"] == 4


def test_chat_messages_go_through_the_tokenizers_template(tmp_path):
    chat = [{"role": "user", "content": "1+1"}]
    data = rows(tmp_path / "data.jsonl", {"prompt": chat}, {"prompt": "2+2"})
    job = tiny.surroundings(tmp_path / "run")
    job.ctx.models.tokenizer.chat_template = (  # type: ignore[attr-defined]
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    )
    run(spec(samples=2, dataset=data, chat_template=True, system="brief"), job.ctx)
    assert {event["samples"][0]["prompt"] for event in job.of_type("step")} == {
        "system: brief\nuser: 1+1\nassistant:",
        "system: brief\nuser: 2+2\nassistant:",
    }
    assert job.of_type("begin")[0]["first_prompt"] == "system: brief\nuser: 1+1\nassistant:"


def test_a_question_is_trained_as_it_is_and_the_begin_event_shows_the_prompt(tmp_path):
    data = rows(tmp_path / "data.jsonl", {"question": "1+1?"})
    job = tiny.surroundings(tmp_path / "run")
    run(spec(samples=1, dataset=data), job.ctx)
    assert {event["samples"][0]["prompt"] for event in job.of_type("step")} == {"1+1?"}
    assert job.of_type("begin")[0]["first_prompt"] == "1+1?"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        pytest.param(
            "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
            r"takes longer than 0\.3 s",
            marks=pytest.mark.slow,
        ),
        ("{{ raise_exception('roles must alternate') }}", "says: roles must alternate"),
    ],
    ids=["endless", "refuses"],
)
def test_a_failing_chat_template_fails_the_job_with_the_row(tmp_path, monkeypatch, template, words):
    monkeypatch.setattr(chat_templates, "LIMIT_S", 0.3)
    job = tiny.surroundings(tmp_path / "run")
    job.ctx.models.tokenizer.chat_template = template  # type: ignore[attr-defined]
    data = rows(tmp_path / "data.jsonl", {"prompt": [{"role": "user", "content": "1+1"}]})
    with pytest.raises(
        JobFailed, match=rf"^dataset: the prompt of row 1: the chat template {words}$"
    ):
        run(spec(samples=1, dataset=data), job.ctx)


def test_chat_messages_without_a_template_fail_in_one_line(tmp_path):
    data = rows(tmp_path / "data.jsonl", {"prompt": [{"role": "user", "content": "1+1"}]})
    with pytest.raises(JobFailed, match=r"^chat_template: the tokenizer of this model has none$"):
        run(spec(samples=1, dataset=data), tiny.surroundings(tmp_path / "run").ctx)


def test_bad_records_are_skipped_with_a_warning_or_refused(tmp_path):
    data = rows(tmp_path / "rows.jsonl", {"prompt": "1="}, {"text": "?"}, {"prompt": "2="})
    options = {"dataset": data, "samples": "all", "steps": 1}
    with pytest.raises(SpecError, match=r"line 2: must be an object with question, prompt"):
        spec(**options).located(tmp_path)
    job = tiny.surroundings(tmp_path / "run")
    run(spec(**options, skip_bad_rows=True).located(tmp_path), job.ctx)
    assert [event["rows_skipped"] for event in job.of_type("warning")] == [1]


def test_all_prompts_are_those_not_held_out():
    assert spec(samples="all").located(Path("/")).samples == 4050
    message = "grader: must go with the reward grader, got one without the other"
    with pytest.raises(SpecError, match=message):
        spec(reward=["grader"])


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": ""}, r"line 2: prompt: must be text, got an empty one$"),
        ({"prompt": [{"role": "user", "content": "x"}]}, r"prompt of row 2 must have a token"),
    ],
)
def test_an_empty_prompt_is_refused_by_name_at_submit(tmp_path, tiny_model, row, words):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['content'] if m['content'] != 'x' }}{% endfor %}"
    )
    data = rows(tmp_path / "data.jsonl", {"prompt": "1+1"}, row)
    with pytest.raises(SpecError, match=words):
        spec(samples=2, dataset=data).check_model_files(folder)


# Tools and template arguments.


def test_prompts_with_tools_are_those_of_transformers_and_differ_by_them(tmp_path):
    tokenizer = tool_chats.tokenizer(tool_chats.source_of("qwen3"))
    chat = [{"role": "user", "content": "1+2?"}]
    tools = tool_chats.TOOLS
    data = rows(
        tmp_path / "d.jsonl",
        {"prompt": chat},
        {"prompt": chat, "tools": tools},
        {"prompt": chat, "tools": tools},
        {"prompt": chat, "chat_template_kwargs": {"enable_thinking": False}},
    )
    found = load(data)
    assert [one.row for one in found] == [1, 2, 4]
    assert found[1].columns["tools"] == tools  # for rewards
    vocabulary = Vocabulary(len(tokenizer), "tiny", lambda token: None)
    texts = [one.text for one in encode(found, tokenizer, vocabulary)]
    how: Any = {"add_generation_prompt": True, "tokenize": False}
    assert texts == [
        tokenizer.apply_chat_template(chat, **how),
        tokenizer.apply_chat_template(chat, tools=tools, **how),
        tokenizer.apply_chat_template(chat, enable_thinking=False, **how),
    ]
    assert fingerprint(found) != fingerprint(found[:1])
    assert len({fingerprint([one]) for one in found}) == 3


def test_tools_that_the_template_does_not_use_are_refused_at_submit(tmp_path):
    tool_chats.tokenizer("{{ messages[0].content }}").save_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": "1+2?"}]
    data = rows(tmp_path / "d.jsonl", {"prompt": "a"}, {"prompt": chat, "tools": tool_chats.TOOLS})
    with pytest.raises(SpecError, match=r"^dataset: the prompt of row 2: tools: the chat template"):
        spec(samples=2, dataset=data).check_chats(tmp_path / "model")
