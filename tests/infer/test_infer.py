"""The infer kind: prompts, chats and files of them, completed by a tiny model."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import orjson
import pytest
import tiny
from small_disks import small_disk
from waiting import wait_until

from warmd.jobs import spec_class
from warmd.jobs.engine.engine import Engine
from warmd.jobs.engine.request import End, Request
from warmd.jobs.errors import JobFailed, SpecError, Stopped
from warmd.jobs.infer import batch_file
from warmd.jobs.infer.kind import run
from warmd.jobs.infer.options import InferSpec
from warmd.jobs.models import chat_templates

CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def model() -> Any:
    """One for all tests: an engine lives as long as its process."""
    return tiny.model(positions=512)


@pytest.fixture
def job(tmp_path: Path, model: Any) -> tiny.Surroundings:
    return tiny.surroundings(tmp_path / "job", model)


def answer(job: tiny.Surroundings, **options: Any) -> dict[str, Any]:
    options.setdefault("temperature", 0)
    if not options.keys() & {"prompt", "messages", "input"}:
        options["prompt"] = "1+1="
    spec = InferSpec.parse(options)
    spec = InferSpec.parse(orjson.loads(orjson.dumps(spec.to_json())))  # as the horse reads it
    return run(spec, job.ctx)


def said(job: tiny.Surroundings, index: int = 0) -> str:
    return "".join(e["text"] for e in job.of_type("text") if e["index"] == index)


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return str(path)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


# --- The spec -------------------------------------------------------------------------------------


def test_the_kind_is_known():
    assert spec_class("infer") is InferSpec
    assert InferSpec.queue == "infer"


@pytest.mark.parametrize(
    "text", ["none", "true", "5", "--help", "@file", "a: b", "'", "\\", "é😀\n"]
)
def test_any_text_is_a_prompt(text):
    spec = InferSpec.parse({"prompt": text, "stop": [text]})
    assert (spec.prompt, spec.stop) == (text, (text,))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "messages": '[{"role": "user", "content": "a"}]'}, "prompt"),
        ({"prompt": "a", "input": "in", "output": "out"}, "prompt"),
        ({"input": "in"}, "input"),
        ({"prompt": "a", "output": "out"}, "output"),
        ({"prompt": "a", "stop": ["x", ""]}, "stop"),
        ({"prompt": "a", "stop": ["x" * 1001]}, "stop"),
        ({"prompt": "a", "system": "b"}, "system"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "temperature": 1e-308}, "temperature"),
        ({"prompt": "a", "temperature": 1e308}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_p": 1.01}, "top_p"),
        ({"prompt": "a", "top_k": 10**12}, "top_k"),
        ({"prompt": "a", "n": 129}, "n"),
        ({"prompt": "a", "max_tokens": 10**12}, "max_tokens"),
        ({"prompt": "a", "seed": 2**63}, "seed"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "seed": -1}, "seed"),
        ({"prompt": "a", "frequency_penalty": 2.1}, "frequency_penalty"),
        ({"messages": "hello"}, "messages"),
        ({"messages": "[]"}, "messages"),
        ({"messages": "{}"}, "messages"),
        ({"messages": '[{"role": "robot", "content": "a"}]'}, "messages"),
        ({"messages": '[{"role": "user"}]'}, "messages"),
        ({"messages": '[{"role": "user", "content": 5}]'}, "messages"),
        ({"messages": '[{"role": "user", "content": [{"type": "audio"}]}]'}, "messages"),
        ({"messages": "[" * 5000}, "messages"),
    ],
)
def test_wrong_options_name_their_field(options, field):
    with pytest.raises(SpecError) as caught:
        InferSpec.parse(options)
    assert caught.value.field == field


def test_a_stored_spec_with_the_former_name_of_the_native_precision_is_read():
    stored = {
        **InferSpec.parse({"prompt": "a", "precision": "native"}).to_json(),
        "precision": "own",
    }
    spec = InferSpec.parse(stored)
    assert spec.precision == "native"
    assert spec.changes(stored) == {}
    with pytest.raises(SpecError, match="one of native, bf16, int8, int4, got 'float'"):
        InferSpec.parse({"prompt": "a", "precision": "float"})


@pytest.mark.parametrize(
    "line", ["{", "5", "{}", '{"prompt": ""}', '{"prompt": 5}', '{"messages": []}', "\ufeff{}"]
)
def test_an_invalid_record_is_named_at_the_command_line(tmp_path, line):
    source = tmp_path / "in.jsonl"
    source.write_text('{"prompt": "a"}\n' + line + "\n", encoding="utf-8")
    spec = InferSpec.parse({"input": str(source), "output": str(tmp_path / "out")})
    with pytest.raises(SpecError, match=r"in\.jsonl, line 2"):
        spec.check_inputs(None)


def test_a_pipe_is_refused_as_input_and_a_byte_order_mark_is_skipped(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(SpecError, match="input: must be a regular file"):
        batch_file.check(tmp_path / "pipe", tmp_path / "out")
    source = tmp_path / "source.jsonl"
    source.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n{"prompt": "b"}\n')
    assert list(batch_file.read(source)) == ["a", "b"]


def test_input_files_are_checked_at_the_command_line(tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}])
    (tmp_path / "old").write_text("precious")
    for paths, words in (
        ({"input": "missing", "output": "out"}, "must be a file"),
        ({"input": str(tmp_path), "output": "out"}, "must be a file"),
        ({"input": source, "output": "nowhere/out"}, "folder that exists"),
        ({"input": source, "output": "old"}, "must be a new file"),
    ):
        spec = InferSpec.parse(paths).located(tmp_path)
        with pytest.raises(SpecError, match=words):
            spec.check_inputs(None)
    assert (tmp_path / "old").read_text() == "precious"


def test_more_tokens_than_the_context_length_are_refused_at_the_command_line():
    spec = InferSpec.parse({"prompt": "a", "max_tokens": 64})
    with pytest.raises(SpecError, match="max_tokens: must be less than 64"):
        spec.check_inputs({"max_position_embeddings": 64})


@pytest.mark.parametrize(
    "options",
    [
        {"messages": '[{"role": "user", "content": "a"}]'},
        {"prompt": "a", "chat_template": True},
    ],
    ids=["messages", "chat_template"],
)
def test_a_chat_without_a_chat_template_is_refused_at_the_command_line(options):
    spec = InferSpec.parse(options)
    with pytest.raises(SpecError, match="must go with a chat template, got demo, whose tokenizer"):
        spec.check_inputs({"has_chat_template": False})
    spec.check_inputs({"has_chat_template": True})


def test_the_lowest_temperature_is_served(job):
    greedy = answer(job, max_tokens=9)["choices"]
    assert answer(job, max_tokens=9, temperature=1e-3)["choices"] == greedy


# --- One prompt -----------------------------------------------------------------------------------


def test_events_and_result_agree(job):
    result = answer(job, n=2, temperature=1, max_tokens=20, seed=7)
    assert [event["type"] for event in job.events][:2] == ["begin", "text"]
    assert job.events[0]["prompt_tokens"] == 4
    for index, choice in enumerate(result["choices"]):
        assert choice["index"] == index
        assert choice["text"] == said(job, index)
        assert choice["finish_reason"] in ("stop", "length")
    tokens = sum(event["tokens"] for event in job.of_type("text"))
    assert result["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": tokens,
        "total_tokens": 4 + tokens,
        "cached_tokens": 0,
    }
    assert (result["seed"], result["model"]) == (7, "demo")
    drafts = {"drafted_tokens", "accepted_tokens"}  # where it was faster to draft some
    assert result["timings"].keys() - drafts == {
        "queued_s", "tokenize_s", "vision_s", "prefill_s", "decode_s", "tokens_per_s",
    }  # fmt: skip
    orjson.dumps(result)


def test_a_seed_repeats_an_answer_and_a_random_one_is_recorded(job):
    first = answer(job, temperature=1, max_tokens=30)
    again = answer(job, temperature=1, max_tokens=30, seed=first["seed"])
    other = answer(job, temperature=1, max_tokens=30)
    assert again["choices"] == first["choices"]
    assert other["seed"] != first["seed"]


def test_greedy_completions_equal_those_of_transformers(job, model):
    import torch

    ids = torch.tensor([tiny.tokenizer()("1+1=")["input_ids"]])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=40
    )
    wanted = tiny.tokenizer().decode(out[0, 4:], skip_special_tokens=True)
    assert answer(job, max_tokens=40)["choices"][0]["text"] == wanted


def test_stop_string_ends_the_text_before_it(job):
    whole = answer(job, max_tokens=30)["choices"][0]["text"]
    stop = whole[8:11]
    choice = answer(job, max_tokens=30, stop=["nosuch", stop])["choices"][0]
    assert choice == {
        "index": 0,
        "text": whole[: whole.index(stop)],
        "finish_reason": "stop",
    }


def test_streamed_text_is_batched_into_few_events(job):
    begun = time.perf_counter()
    result = answer(job, prompt="a" * 9, max_tokens=400, seed=1, temperature=2)
    seconds = time.perf_counter() - begun
    texts = job.of_type("text")
    assert len(texts) <= 3 + seconds / 0.05
    assert said(job) == result["choices"][0]["text"]


def test_a_completion_ends_at_the_context_length(job):
    assert answer(job, prompt="a" * 500, temperature=1)["usage"]["total_tokens"] <= 512
    with pytest.raises(JobFailed, match="at most 12 are left, got 13"):
        answer(job, prompt="a" * 500, max_tokens=13)
    with pytest.raises(JobFailed, match="at most 0 are left"):
        answer(job, prompt="a" * 512)


def test_chat_goes_through_the_template(job):
    with pytest.raises(JobFailed, match="chat_template"):
        answer(job, prompt="hi", chat_template=True)
    job.ctx.models.tokenizer.chat_template = CHAT
    raw = answer(job, prompt="system: be good\nuser: hi\nassistant:", max_tokens=9)
    messages = json.dumps([{"role": "user", "content": "hi"}])
    for options in (
        {"prompt": "hi", "chat_template": True, "system": "be good"},
        {"messages": messages, "system": "be good"},
    ):
        chat = answer(job, max_tokens=9, **options)
        assert chat["choices"] == raw["choices"]
        assert chat["usage"]["prompt_tokens"] == raw["usage"]["prompt_tokens"]


def test_a_prompt_far_beyond_the_context_is_refused_before_it_is_tokenized(job):
    text = "a" * 60_000_000
    begun = time.thread_time()
    with pytest.raises(
        JobFailed, match=r"prompt: must have at most 2560 characters .* got 60000000"
    ):
        answer(job, prompt=text)
    assert time.thread_time() - begun < 5  # to tokenize it took minutes and gigabytes


def test_a_chat_far_beyond_the_context_is_refused_before_it_is_rendered(job):
    job.ctx.models.tokenizer.chat_template = "{{ raise_exception('it was rendered') }}"
    half = {"role": "user", "content": [{"type": "text", "text": "a" * 1300}]}
    messages = orjson.dumps([half, {"role": "assistant", "content": "a" * 1300}]).decode()
    wanted = r"messages: must have at most 2560 characters .* got 2600"
    with pytest.raises(JobFailed, match=wanted):
        answer(job, messages=messages)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
         "messages: the chat template takes longer than"),
        ("{{ raise_exception('roles must alternate') }}", "says: roles must alternate"),
        ("{{ 1 / 0 }}", "says: ZeroDivisionError"),
        ("{{ messages[5].content.x }}", "says: .*has no element 5"),
    ],
    ids=["endless", "refuses", "divides", "undefined"],
)  # fmt: skip
def test_a_failing_chat_template_fails_the_job_with_its_error(job, monkeypatch, template, words):
    monkeypatch.setattr(chat_templates, "LIMIT_S", 0.3)
    job.ctx.models.tokenizer.chat_template = template
    with pytest.raises(JobFailed, match=words):
        answer(job, prompt="hi", chat_template=True)


def test_a_growing_chat_reuses_the_prefix_cache(job):
    job.ctx.models.tokenizer.chat_template = CHAT
    messages = [{"role": "user", "content": "tell me " * 20}]
    first = answer(job, messages=json.dumps(messages), max_tokens=9)
    messages += [
        {"role": "assistant", "content": first["choices"][0]["text"]},
        {"role": "user", "content": "and more"},
    ]
    second = answer(job, messages=json.dumps(messages), max_tokens=9)
    assert first["usage"]["cached_tokens"] == 0
    assert second["usage"]["cached_tokens"] >= 128


def test_a_stop_request_ends_a_completion_at_the_next_token(job):
    job.stop.set()
    with pytest.raises(Stopped):
        answer(job, max_tokens=400)
    assert sum(event["tokens"] for event in job.of_type("text")) <= 2


# --- Files of prompts -----------------------------------------------------------------------------


def test_a_file_of_prompts_is_answered_in_order(job, tmp_path):
    job.ctx.models.tokenizer.chat_template = CHAT
    prompts: list[Any] = [{"prompt": "a" * (1 + 37 * n % 50)} for n in range(50)]
    prompts[7] = {"messages": [{"role": "user", "content": "hi"}]}
    source = write_rows(tmp_path / "in.jsonl", prompts)
    result = answer(job, input=source, output=str(tmp_path / "out.jsonl"), max_tokens=8)
    rows = read_rows(tmp_path / "out.jsonl")
    assert [row["row"] for row in rows] == list(range(1, 51))
    for row in (0, 7, 23, 49):
        options = dict(prompts[row])
        if "messages" in options:
            options["messages"] = json.dumps(options["messages"])
        alone = answer(job, max_tokens=8, **options)
        assert rows[row]["choices"] == alone["choices"]
    assert result["rows"] == 50
    last = job.of_type("progress")[-1]
    assert (last["done"], last["total"]) == (50, 50)


def test_what_is_not_answered_is_counted_in_the_begin_event(job, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'\n{"prompt": "a", "id": 7}\n\n{"prompt": "b"}\n')
    answer(job, input=str(source), output=str(tmp_path / "out.jsonl"), max_tokens=2)
    [begin] = job.of_type("begin")
    assert (begin["rows"], begin["left_out"]) == (2, "blank lines: 2; columns (records): id (1)")


def test_a_resumed_file_continues_after_the_last_completed_record(job, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "ab"[: 1 + n % 2]} for n in range(60)])
    target = tmp_path / "out.jsonl"
    options = {"input": source, "output": str(target), "max_tokens": 5, "temperature": 1}
    whole = tmp_path / "whole.jsonl"
    answer(job, **{**options, "output": str(whole)})

    lines = whole.read_bytes().splitlines(keepends=True)
    target.write_bytes(b"".join(lines[:20]) + lines[20][:9])  # killed in the middle of a line
    job.events.clear()
    answer(job, **options)
    assert job.of_type("progress")[0]["done"] == 20
    assert target.read_bytes() == whole.read_bytes()
    answer(job, **options)  # killed after the last line, before the event
    assert target.read_bytes() == whole.read_bytes()


def test_failed_records_get_an_error_and_the_others_a_completion(job, tmp_path):
    job.ctx.models.tokenizer.chat_template = (
        "{% if messages[0].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
        "{{ messages[0].content }}"
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    wrong = {
        2: ({"prompt": "a" * 600}, "max_tokens: the prompt has 600 tokens"),
        5: ({"prompt": "a" * 9000}, "prompt: must have at most 2560 characters"),
        6: ({"messages": [{"role": "user", "content": "no"}]}, "template says: not that"),
        9: ({"messages": [{"role": "user", "content": [image]}]}, "messages: images must go with"),
    }
    prompts: list[Any] = [{"prompt": "ab"[: 1 + n % 2]} for n in range(40)]
    for number, (prompt, _) in wrong.items():
        prompts[number] = prompt
    source = write_rows(tmp_path / "in.jsonl", prompts)
    options = {"input": source, "output": str(tmp_path / "out.jsonl"), "max_tokens": 5}
    result = answer(job, **options)
    assert (result["rows"], result["failed"]) == (40, 4)
    lines = read_rows(tmp_path / "out.jsonl")
    assert [line["row"] for line in lines] == list(range(1, 41))
    for number, line in enumerate(lines):
        if number in wrong:
            assert line.keys() == {"row", "job", "error"}
            assert wrong[number][1] in line["error"]["message"]
        else:
            assert line["choices"] == answer(job, max_tokens=5, **prompts[number])["choices"]
    assert answer(job, **options)["failed"] == 4  # those of an execution before, too


def test_nothing_is_computed_for_a_job_that_has_failed(job, tmp_path, monkeypatch):
    class FullDisk(batch_file.Answers):
        def append(self, answer: dict[str, Any]) -> None:
            raise OSError("disk full")

    requested: list[Request] = []

    def submit(self: Engine, request: Request, submit: Any = Engine.submit) -> None:
        requested.append(request)
        submit(self, request)

    monkeypatch.setattr(batch_file, "Answers", FullDisk)
    monkeypatch.setattr(Engine, "submit", submit)
    # The first is too long, and so the first to be written; the last waits for room.
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a" * 600}, *[{"prompt": "a"}] * 40])
    with pytest.raises(OSError, match="disk full"):
        answer(job, input=source, output=str(tmp_path / "out"), n=4, max_tokens=400)
    reasons = []
    while not isinstance(piece := requested[-1].pieces.get(timeout=60), End):
        reasons.append(piece.finish_reason)
    assert set(reasons) <= {None, "cancelled"}


def test_a_file_whose_disk_was_full_continues_after_the_last_completed_record(job, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "ab"[: 1 + n % 2]} for n in range(60)])
    options = {"input": source, "max_tokens": 5, "temperature": 1}
    whole = tmp_path / "whole.jsonl"
    answer(job, output=str(whole), **options)
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", "24k") as disk:
        assert whole.stat().st_size < 20_000
        (disk / "filler").write_bytes(bytes(20 << 10))
        target = disk / "out.jsonl"
        with pytest.raises(OSError, match="No space left on device"):
            answer(job, output=str(target), **options)
        assert 0 < target.stat().st_size <= 4096
        (disk / "filler").unlink()
        answer(job, output=str(target), **options)
        assert target.read_bytes() == whole.read_bytes()


def test_the_output_of_another_job_is_not_overwritten(job, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    target = tmp_path / "out.jsonl"
    target.write_text('{"row": 1, "job": "somebody-else"}\n')
    with pytest.raises(JobFailed, match="is not of this job"):
        answer(job, input=source, output=str(target))
    assert target.read_text() == '{"row": 1, "job": "somebody-else"}\n'


def test_a_stopped_file_keeps_its_completions(job, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}] * 400)
    target = tmp_path / "out"

    def stop() -> None:
        wait_until(lambda: target.exists() and target.stat().st_size)
        job.stop.set()

    (thread := threading.Thread(target=stop)).start()
    with pytest.raises(Stopped):
        answer(job, input=source, output=str(target), max_tokens=50)
    thread.join()
    rows = read_rows(target)
    assert [row["row"] for row in rows] == list(range(1, len(rows) + 1))
    assert all("choices" in row for row in rows)


def test_a_job_that_wrote_nothing_leaves_no_output_file(job, tmp_path):
    source = write_rows(tmp_path / "in.jsonl", [{"prompt": "a"}] * 40)
    (tmp_path / "disk").mkdir()
    with small_disk(tmp_path / "disk", "64k") as disk:
        options = {"input": source, "output": str(disk / "out"), "max_tokens": 5}
        job.stop.set()
        with pytest.raises(Stopped):
            answer(job, **options)
        job.stop.clear()
        (disk / "filler").write_bytes(bytes(64 << 10))
        with pytest.raises(OSError, match="No space left on device"):
            answer(job, **options)
        assert [path.name for path in disk.iterdir()] == ["filler"]
        (disk / "filler").unlink()
        assert answer(job, **options)["rows"] == 40


def test_token_ids_are_those_of_prompt_and_completions_whole_and_in_events(job):
    tokenizer = tiny.tokenizer()
    result = answer(job, prompt="1+1=", max_tokens=9, n=2, seed=1, temperature=1, token_ids=True)
    assert result["prompt_token_ids"] == [tokenizer("1+1=")["input_ids"]]
    events = job.of_type("text")
    told = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
    assert told == result["prompt_token_ids"]
    for choice in result["choices"]:
        ids = choice["token_ids"]
        assert tokenizer.decode(ids, skip_special_tokens=True) == choice["text"]
        streamed = [event["token_ids"] for event in events if event["index"] == choice["index"]]
        assert sum(streamed, []) == ids  # noqa: RUF017
    assert (
        sum(len(c["token_ids"]) for c in result["choices"]) == result["usage"]["completion_tokens"]
    )


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("[1]", "must be a JSON object such as"),
        ('{"a": 1}', "must have token ids as keys, got 'a'"),
        ('{"1": 101}', "1: must be from -100 to 100, got 101"),
        ('{"1": true}', "1: must be from -100 to 100, got True"),
        ('{"1": 1, "01": 2}', "must name each token once"),
        ("{", "must be a JSON object such as"),
    ],
)
def test_a_bias_that_is_none_is_refused(given, problem):
    with pytest.raises(SpecError, match=problem) as refused:
        InferSpec.parse({"prompt": "1", "logit_bias": given})
    assert refused.value.field == "logit_bias"


def test_a_bias_of_a_token_that_the_model_lacks_is_refused(job):
    with pytest.raises(JobFailed, match=r"^logit_bias: token 99999 is not among"):
        answer(job, logit_bias='{"99999": 1}')
