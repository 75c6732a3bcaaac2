"""What a training's prompts were put into is stored with the model, and used where it answers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx2 as httpx
import orjson
import pytest
import tiny
from daemons import Daemon
from shell import Done, warmd
from waiting import wait_until

from warmd.daemon.client.checking import trained_prompt
from warmd.jobs import spec_class
from warmd.jobs.data import templates
from warmd.jobs.data.trained_prompt import FILE, TrainedPrompt
from warmd.jobs.errors import SpecError

QA = templates.NAMED["qa"]
GREEDY = ("--temperature", "0", "--max-tokens", "6")


@pytest.fixture(scope="module")
def daemon(shared_daemon: Daemon) -> Daemon:
    return shared_daemon


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [{"question": f"{n}+1", "answer": str(n + 1)} for n in range(12)]
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def trained(daemon: Daemon, data: Path, kind: str = "sft", **options: Any) -> str:
    values = {"model": "tiny", "dataset": str(data), "steps": 2, "save_every": 1, **options}
    job_id = daemon.client.jobs.submit(spec_class(kind).parse(values))
    assert daemon.wait(job_id)["status"] == "finished"
    return job_id


@pytest.fixture(scope="module")
def job(daemon: Daemon, data: Path) -> str:
    """A job that trained questions in the template `qa`."""
    return trained(daemon, data, template="qa", learning_rate=0.05)


@pytest.fixture(scope="module")
def chatter(daemon: Daemon, data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job that trained questions as chats with a system message."""
    folder = tmp_path_factory.mktemp("models") / "chatter"
    model, tokenizer = tiny.chatting()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return trained(
        daemon, data, model=str(folder), template="qa", chat_template=True, system="Be brief"
    )


def run(daemon: Daemon, *arguments: str) -> Done:
    done = warmd("run", *GREEDY, *arguments, home=daemon.home.path)
    assert done.code == 0, done.err
    return done


@pytest.mark.parametrize("name", templates.NAMED)
@pytest.mark.parametrize("kind", ["sft", "grpo", "eval", "infer"])
def test_a_template_may_be_given_by_name(kind: str, name: str) -> None:
    prompt = {"prompt": "?"} if kind == "infer" else {"dataset": "a.jsonl"}
    spec = spec_class(kind).parse({**prompt, "template": name})
    assert getattr(spec, "template") == templates.NAMED[name]  # noqa: B009 (of several kinds)


@pytest.mark.parametrize("kind", ["sft", "grpo", "eval", "infer"])
def test_other_names_are_refused(kind: str) -> None:
    prompt = {"prompt": "?"} if kind == "infer" else {"dataset": "a.jsonl"}
    with pytest.raises(SpecError) as caught:
        spec_class(kind).parse({**prompt, "template": "maths"})
    assert str(caught.value) == (
        "template: must be as-is, math, qa, or contain {question}, got 'maths'"
    )


def test_it_is_stored_with_the_model_and_with_checkpoints(daemon: Daemon, job: str) -> None:
    folder = daemon.home.runs / job
    for place in (folder / "model", folder / "checkpoints" / "checkpoint-1"):
        assert TrainedPrompt.read(place) == TrainedPrompt(template=QA)


@pytest.mark.slow
def test_nothing_is_stored_of_prompts_that_are_used_as_they_are(daemon: Daemon, data: Path) -> None:
    assert not list((daemon.home.runs / trained(daemon, data)).rglob(FILE))


@pytest.mark.parametrize("model", ["{}", "{}@1"])
def test_run_puts_prompts_into_the_template_and_says_so(
    daemon: Daemon, job: str, model: str
) -> None:
    model = model.format(job)
    done = run(daemon, "--model", model, "3+1")
    whole = run(daemon, "--model", model, "--template", "as-is", QA.replace("{question}", "3+1"))
    assert done.out == whole.out
    assert "template 'Question: {question}\\nAnswer:'" in done.err
    assert whole.err == ""


def test_a_copied_model_keeps_its_template(daemon: Daemon, job: str, tmp_path: Path) -> None:
    shutil.copytree(daemon.home.runs / job / "model", tmp_path / "copy")
    done = run(daemon, "--model", str(tmp_path / "copy"), "3+1")
    assert done.out == run(daemon, "--model", job, "3+1").out
    assert "Question" in done.err


@pytest.mark.slow
def test_an_adapter_and_the_merged_model_have_it(
    daemon: Daemon, data: Path, tmp_path: Path
) -> None:
    job_id = trained(daemon, data, template="qa", lora=2)
    assert TrainedPrompt.read(daemon.home.runs / job_id / "model") == TrainedPrompt(template=QA)
    merged = ("checkpoints", "export", job_id, str(tmp_path / "merged"), "--merge")
    assert warmd(*merged, home=daemon.home.path).code == 0
    assert TrainedPrompt.read(tmp_path / "merged") == TrainedPrompt(template=QA)


def test_a_model_that_an_earlier_version_trained_has_that_of_its_job(
    daemon: Daemon, job: str, tmp_path: Path
) -> None:
    run_dir = tmp_path / job
    shutil.copytree(daemon.home.runs / job, run_dir)
    for path in run_dir.rglob(FILE):
        path.unlink()
    for folder in (run_dir / "model", run_dir / "checkpoints" / "checkpoint-1"):
        assert trained_prompt(folder) == TrainedPrompt(template=QA)
    assert trained_prompt(run_dir) is None


@pytest.mark.parametrize(
    "content",
    [
        *(b"{", b"[]", b"\xff" * 99, b"[" * 2**21),
        b'{"template": 1, "chat_template": false, "system": null}',
        b'{"template": "no place", "chat_template": false, "system": null}',
        orjson.dumps(asdict(TrainedPrompt(template="{question}" * 17))),
        orjson.dumps(asdict(TrainedPrompt(template="{question}" + "a" * 100_000))),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(SpecError) as caught:
        TrainedPrompt.read(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"prompts": "[[5, 6, 7]]", "template": "as-is"},
        {"prompt": "3+1", "echo": True},
        {"prompt": "3+1", "reply": "tokens"},
        {"prompt": "3+1", "system": "Be long", "chat_template": True},
    ],
)
def test_what_is_no_plain_prompt_is_not_changed(
    daemon: Daemon, chatter: str, options: dict[str, Any]
) -> None:
    spec: Any = spec_class("infer")
    stored = daemon.client.jobs.check(spec.parse({"model": chatter, **options}))["spec"]
    assert not spec.parse(stored).prompt_format.get("template")  # a worker reads it so
    assert {**stored, **options, "template": ""} == {**stored, "template": ""}


def test_compare_asks_both_models_in_the_same_prompt(daemon: Daemon, job: str) -> None:
    done = warmd("compare", *GREEDY, "--json", job, "3+1", home=daemon.home.path)
    assert done.code == 0
    whole = QA.replace("{question}", "3+1")
    for side, model in (("base", "tiny"), ("trained", job)):
        alone = run(daemon, "--model", model, "--template", "as-is", whole).out
        assert done.objects[0][side]["text"].rstrip() == alone.rstrip("\n").rstrip()
    assert "Question" in done.err


def test_eval_asks_in_the_template_and_given_options_win(
    daemon: Daemon, job: str, data: Path
) -> None:
    for given, prompt in ({}, QA.replace("{question}", "0+1")), ({"template": "as-is"}, "0+1"):
        values = {"model": job, "dataset": str(data), "samples": 2, "max_tokens": 2, **given}
        found = daemon.client.jobs.submit(spec_class("eval").parse(values))
        daemon.wait(found)
        (begin,) = daemon.events(found, "begin")
        assert begin["first_prompt"] == prompt


def test_files_of_prompts_are_answered_in_the_template(
    daemon: Daemon, job: str, tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "3+1"}\n')
    values = {"model": job, "input": str(tmp_path / "in.jsonl"), "temperature": 0, "max_tokens": 6}
    values["output"] = str(tmp_path / "out.jsonl")
    daemon.wait(daemon.client.jobs.submit(spec_class("infer").parse(values)))
    (line,) = (tmp_path / "out.jsonl").read_bytes().splitlines()
    text = orjson.loads(line)["choices"][0]["text"]
    assert text.rstrip() == run(daemon, "--model", job, "3+1").out.rstrip("\n").rstrip()


def test_chat_asks_single_questions_of_a_model_without_a_chat_template(
    daemon: Daemon, job: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "lines").write_text("3+1\n3+1\n")
    with (tmp_path / "lines").open() as lines:
        monkeypatch.setattr("sys.stdin", lines)
        done = warmd("chat", job, *GREEDY, home=daemon.home.path)
    assert done.code == 0, done.err
    one = run(daemon, "--model", job, "3+1").out
    assert done.out == one * 2
    assert "question of its own" in done.err


def test_prompts_become_the_chats_that_were_trained(daemon: Daemon, chatter: str) -> None:
    done = run(daemon, "--model", chatter, "3+1")
    given = ("--template", "qa", "--chat-template", "--system", "Be brief")
    assert done.out == run(daemon, "--model", chatter, *given, "3+1").out
    assert "chat template, system message 'Be brief'" in done.err
    chat = '[{"role": "user", "content": "3+1"}]'
    spec = spec_class("infer").parse({"model": chatter, "messages": chat})
    document = daemon.client.jobs.check(spec)["spec"]
    assert (document["template"], document["system"]) == (templates.AS_IT_IS, "Be brief")


@pytest.fixture(scope="module")
def http(daemon: Daemon) -> Iterator[httpx.Client]:
    url = wait_until(lambda: daemon.status()["http"]["url"])
    with httpx.Client(base_url=url, timeout=60) as client:
        yield client


PROMPT = {"temperature": 0, "max_tokens": 6}


def test_http_puts_prompts_into_the_template_and_says_so(
    daemon: Daemon, http: httpx.Client, job: str
) -> None:
    whole = QA.replace("{question}", "3+1")
    asked = {"model": job, **PROMPT}
    plain = {**asked, "prompt": whole, "template": "as-is"}
    expected = http.post("/v1/completions", json=plain).json()
    assert "prompt_format" not in expected
    answer = http.post("/v1/completions", json={**asked, "prompt": "3+1"}).json()
    assert answer["prompt_format"] == {"template": QA}
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    chat = {**asked, "messages": [{"role": "user", "content": "3+1"}]}
    said = http.post("/v1/chat/completions", json=chat).json()
    assert said["choices"][0]["message"]["content"] == expected["choices"][0]["text"]
    assert said["prompt_format"] == {"template": QA}
    streamed = http.post("/v1/completions", json={**asked, "prompt": "3+1", "stream": True}).text
    last = orjson.loads(streamed.split("data: ")[-2])
    assert last["prompt_format"] == {"template": QA}
    response = {"model": job, "input": "3+1", "temperature": 0}
    assert http.post("/v1/responses", json=response).json()["prompt_format"] == {"template": QA}
    shown = http.get(f"/v1/warmd/models/{job}").json()
    assert shown["prompt_format"]["template"] == QA


@pytest.mark.parametrize(
    "option",
    [
        {"reasoning_effort": "high"},
        {"thinking_token_budget": 5},
        {"tools": [{"type": "function", "function": {"name": "add"}}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ],
)
def test_options_of_a_chat_template_are_refused_without_one(
    http: httpx.Client, job: str, option: dict[str, Any]
) -> None:
    body = {"model": job, "messages": [{"role": "user", "content": "3+1"}], **option}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "without tools and options of a chat template" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": role, "content": "1"} for role in ("user", "assistant", "user")],
        [{"role": "system", "content": "1"}],
    ],
)
def test_chats_that_are_no_question_are_refused_without_a_chat_template(
    http: httpx.Client, job: str, messages: list[dict[str, str]]
) -> None:
    answer = http.post("/v1/chat/completions", json={"model": job, "messages": messages})
    assert answer.status_code == 400
    assert "must be one user message of text" in answer.json()["error"]["message"]
