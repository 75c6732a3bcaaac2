"""Errors that a GRPO job would find in its first second are refused at submission."""

from __future__ import annotations

import json
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from shell import warmd
from transformers import AutoTokenizer

from warmd.configs import gpus
from warmd.configs.config import DaemonConfig
from warmd.configs.memory import memory_bytes, swap_bytes
from warmd.configs.units import format_size
from warmd.daemon.client.client import Client
from warmd.jobs.errors import SpecError
from warmd.jobs.files.chats import Chat
from warmd.jobs.grpo.options import GrpoSpec
from warmd.jobs.models import chat_templates
from warmd.jobs.models.chat_templates import ChatTemplate
from warmd.jobs.models.tokenizer_folder import TokenizerFolder


def spec_of(folder: Path, *rows: dict[str, Any], **options: Any) -> GrpoSpec:
    data = folder / "rows.jsonl"
    data.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    values = {"dataset": str(data), "samples": len(rows), "reward": ["math"]}
    return GrpoSpec.parse(values | options)


def refusal(model: Path, folder: Path, *rows: dict[str, Any], **options: Any) -> str | None:
    try:
        spec_of(folder, *rows, **options).check_model_files(model)
    except SpecError as error:
        return str(error)
    return None


def test_a_prompt_that_does_not_fit_the_model_is_refused_by_its_row(tiny_model, tmp_path):
    rows = [{"prompt": "short"}, {"prompt": "long" * 20}]
    assert refusal(tiny_model, tmp_path, *rows) == (
        "max_prompt_length: the prompt of row 2 has 80 tokens and the model takes 64 together with "
        "the completion; set a max_prompt_length, to cut it, or a smaller max_completion_length"
    )
    assert refusal(tiny_model, tmp_path, *rows, max_prompt_length=10) is None
    assert refusal(tiny_model, tmp_path, {"prompt": "x" * 63}) is None
    assert refusal(tiny_model, tmp_path, {"prompt": "x" * 63}, max_completion_length=2) is not None


def test_a_prompt_of_megabytes_is_refused_quickly(tiny_model, tmp_path):
    said = refusal(tiny_model, tmp_path, {"prompt": "x" * 5_000_000})
    assert said is not None
    assert said.startswith("max_prompt_length: the prompt of row 1 has at least 99999 tokens")


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": [{"role": "user", "content": "1+1"}]}, {}),
        ({"prompt": "1+1"}, {"chat_template": True}),
    ],
)
def test_a_chat_is_refused_for_a_tokenizer_without_a_template(tiny_model, tmp_path, row, options):
    assert refusal(tiny_model, tmp_path, row, **options) == (
        "chat_template: the tokenizer of this model has none"
    )
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_model.glob("*.json"):
        (other / file.name).write_bytes(file.read_bytes())
    (other / "chat_template.jinja").write_text("{{ messages }}")
    assert refusal(other, tmp_path, row, **options) is None


def test_checks_that_need_missing_files_are_left_to_the_job(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 8}))
    chat = [{"role": "user", "content": "1+1"}]
    assert refusal(folder, tmp_path, {"prompt": "far too long"}, {"prompt": chat}) is None


def with_template(model: Path, folder: Path, template: str) -> Path:
    """A copy of a model's small files, with a chat template."""
    folder.mkdir()
    for file in model.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "chat_template.jinja").write_text(template)
    return folder


TURNS = """{%- for message in messages %}
    {%- if message.role not in ('system', 'user') %}
        {{- raise_exception('no ' + message.role) }}
    {%- endif %}
    {{- bos_token + message.role + ': ' + message.content + eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}{{ 'answer: ' }}{% endif %}"""


@pytest.mark.parametrize(
    ("row", "options"),
    [
        ({"prompt": [{"role": "user", "content": "x" * 40}]}, {"system": "brief"}),
        ({"prompt": "x" * 40}, {"system": "brief"}),
        ({"question": "x" * 40}, {"template": "{question}", "system": "brief"}),
    ],
    ids=["messages", "prompt", "question"],
)
def test_a_chat_is_refused_by_its_length_after_the_template(tiny_model, tmp_path, row, options):
    model = with_template(tiny_model, tmp_path / "chats", TURNS)
    options |= {"chat_template": True}
    # <bos>user: x…x<eos>answer: has 8 + 40 + 8 tokens, and <bos>system: brief<eos> has 15 more.
    assert refusal(model, tmp_path, row, **options) == (
        "max_prompt_length: the prompt of row 1 has 71 tokens and the model takes 64 together with "
        "the completion; set a max_prompt_length, to cut it, or a smaller max_completion_length"
    )
    assert refusal(model, tmp_path, row, **{**options, "system": None}) is None
    assert refusal(model, tmp_path, row, **options, max_prompt_length=10) is None


def test_a_chat_that_the_template_rejects_is_refused_with_its_message(tiny_model, tmp_path):
    model = with_template(tiny_model, tmp_path / "chats", TURNS)
    fine = {"prompt": [{"role": "user", "content": "1+1"}]}
    wrong = {"prompt": [{"role": "tool", "content": "1+1"}]}
    for options in ({}, {"max_prompt_length": 10}):
        assert refusal(model, tmp_path, fine, wrong, **options) == (
            "dataset: the prompt of row 2: the chat template says: no tool"
        )


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
        "{{ messages[5].content.x }}",
        "{% no template",
        "{{ '\\ud800' * 100 }}",
    ],
    ids=["endless", "fails", "no template", "surrogates"],
)
def test_a_template_that_cannot_be_rendered_in_time_is_left_to_the_job(
    tiny_model, tmp_path, template
):
    model = with_template(tiny_model, tmp_path / "chats", template)
    begun = time.monotonic()
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}]} for n in range(3)]
    said = refusal(model, tmp_path, *rows)
    assert said is None or "row 1 has 100 tokens" in said
    assert time.monotonic() - begun < 2  # one for the check, the rest for a busy machine


SLOW = "{% for i in range(90000) %}{% for j in range(20) %}{% endfor %}{% endfor %}"


@pytest.mark.slow
def test_prompts_that_are_left_to_the_job_are_counted_in_a_note(tiny_model, tmp_path, monkeypatch):
    model = with_template(tiny_model, tmp_path / "chats", SLOW + "{{ messages[0].content }}")
    rows = [{"prompt": [{"role": "user", "content": f"{n}"}]} for n in range(1000)]
    said = spec_of(tmp_path, *rows).check_model_files(model)
    assert said is not None
    left, rest = said.split(maxsplit=1)
    assert 0 < int(left) < 1000
    assert rest == "of 1,000 prompts are not checked yet: the job checks them when it starts"
    assert spec_of(tmp_path, {"prompt": "short"}).check_model_files(model) is None
    monkeypatch.chdir(tmp_path)
    words = ("--model", str(model), "--dataset", "rows.jsonl", "--samples", "1000")
    spec_of(tmp_path, *rows)
    done = warmd("submit", "grpo", *words, "--reward", "math", "--dry-run", home=tmp_path / "home")
    assert done.code == 0, done.err
    assert done.err.count(rest) == 1


def huge_model(folder: Path, parameters: int) -> Path:
    """A model folder whose weights are a hole in their file."""
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8}
    config |= {"num_hidden_layers": 2, "intermediate_size": 8, "vocab_size": 100}
    (folder / "config.json").write_bytes(orjson.dumps(config))
    header = orjson.dumps(
        {"w": {"dtype": "F32", "shape": [parameters], "data_offsets": [0, 4 * parameters]}}
    )
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(file.tell() + 4 * parameters)
    return folder


def test_a_training_that_needs_more_than_all_memory_is_refused_with_both_sizes(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(gpus, "visible", lambda: 0)  # with a GPU the job compares with its memory
    all_memory = memory_bytes() + swap_bytes()
    client = Client(DaemonConfig(home=tmp_path / "home"))
    shared = Client(DaemonConfig(home=tmp_path / "home", redis_url="redis://127.0.0.1:1/0"))
    small, huge = (
        huge_model(tmp_path / name, parameters)
        for name, parameters in (("small", 1000), ("huge", all_memory // 16 + 10**9))
    )
    client.jobs.check(spec_of(tmp_path, {"prompt": "a"}, model=str(small)))
    spec = spec_of(tmp_path, {"prompt": "a"}, model=str(huge))
    with pytest.raises(SpecError) as refused:
        client.jobs.check(spec)
    assert str(refused.value) == (
        f"model: must fit the memory of this machine ({format_size(all_memory)}), got one that "
        f"needs at least {format_size(all_memory + 16 * 10**9)} to be trained: train a smaller "
        "model, or an adapter (lora)"
    )
    shared.jobs.check(spec)  # another machine may have more
    if 4 * (all_memory // 16 + 10**9) < memory_bytes():
        client.jobs.check(replace(spec, lora=4))


@pytest.mark.parametrize(
    "template",
    [
        TURNS,
        "{% for m in messages %}\n  {% generation %}{{ m | tojson }}{% endgeneration %}\n"
        "{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}{{ pad_token }}{{ nothing }}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
        "{{ ns.n }} {{ dict(a=1) }} {{ tools is none }} {{ documents is none }}"
        "{{ strftime_now('%Y') }}{{ messages | tojson(indent=2) }}",
        "{% set ns = namespace(self=1, b=dict.fromkeys('ab', 2)) %}{{ ns.self }}{{ ns.b }}"
        "{% for m in messages %}{{ m }}{{ m.thinking }}{{ m.tool_calls is defined }}{% endfor %}",
    ],
    ids=["turns", "generation", "globals", "reasoning"],
)
@pytest.mark.parametrize("form", ["jinja", "config", "named"])
def test_a_folder_renders_its_template_as_transformers_does(tiny_model, tmp_path, template, form):
    model = with_template(tiny_model, tmp_path / "chats", template)
    if form != "jinja":
        (model / "chat_template.jinja").unlink()
        config = json.loads((model / "tokenizer_config.json").read_text())
        other = {"name": "tool_use", "template": "another"}
        named = [other, {"name": "default", "template": template}]
        config["chat_template"] = template if form == "config" else named
        config["eos_token"] = {"__type": "AddedToken", "content": "<eos>", "special": True}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
    chat: list[dict[str, Any]] = [
        {"role": "system", "content": "<brief> & ä"},
        {"role": "user", "content": "1+1\n", "tool_calls": None},
        *([{"role": "user", "content": "", "reasoning": "2"}] if "thinking" in template else []),
    ]
    how: Any = {"add_generation_prompt": True, "tokenize": False}
    found = TokenizerFolder(model).chat_template()
    assert found is not None
    tokenizer = AutoTokenizer.from_pretrained(model)
    expected = tokenizer.apply_chat_template(chat, **how)
    assert chat_templates.render(found, Chat(chat)) == expected
    assert chat_templates.render(ChatTemplate.of(tokenizer), Chat(chat)) == expected
