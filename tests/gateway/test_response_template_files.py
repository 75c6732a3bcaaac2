"""A model that is loaded with a response template calls tools, also after restarts; real daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_models
import httpx2 as httpx
import openai
import pytest
import tool_chats
from daemons import Daemon
from gateways import openai_client
from shell import warmd
from transformers import PreTrainedTokenizerFast
from waiting import wait_until

from warmd.daemon.host.warm_set import known_models

# A family that TRL does not know.
TEMPLATE = """\
{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content or '' }}{% for c in m.tool_calls or [] %}\
<call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</call>\
{% endfor %}<|im_end|>
{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}\
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
FAMILY = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>"},
    },
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    gguf_models.make(folder, "qwen2", "qwen2")
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.add_tokens(["<call>", "</call>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def daemon(shared_daemon: Daemon) -> Daemon:
    """A daemon with a resident worker for inference, which runs again when a test ends."""
    return shared_daemon


def url(daemon: Daemon) -> str:
    found: str = wait_until(lambda: daemon.status()["http"]["url"], timeout_s=60)
    return found


def ask(daemon: Daemon, **options: Any) -> Any:
    with openai_client(url(daemon), timeout=60) as client:
        return client.chat.completions.create(
            model="mine",
            **{
                "messages": [{"role": "user", "content": "1+2?"}],
                "tools": [tool_chats.SHORT_TOOL],
                "tool_choice": "required",
                "max_tokens": 100,
                **options,
            },
        )


def called(daemon: Daemon) -> Any:
    [choice] = ask(daemon, seed=1).choices
    [call] = choice.message.tool_calls or [None]
    return None if call is None else call.function.name


def load(daemon: Daemon, *arguments: str, folder: Path | None = None) -> Any:
    return warmd("load", *arguments, home=daemon.home.path, folder=folder)


@pytest.mark.nightly(
    part="daemons",
    catches="a template for responses that a restart, a reload or a wrong file loses",
)
def test_a_file_makes_calls_readable_until_another_is_given(daemon, model, tmp_path):
    home = daemon.home.path
    assert load(daemon, f"mine={model}").code == 0
    with pytest.raises(openai.BadRequestError, match=r"tools: must go with .*--response-template"):
        ask(daemon)

    file = tmp_path / "family.json"
    file.write_text(json.dumps(FAMILY))
    done = load(daemon, "mine", "--response-template", "family.json", folder=tmp_path)
    assert (done.code, "is used instead of" in done.err) == (0, False)
    assert known_models(daemon.home)["mine"].response_template == str(file)
    assert called(daemon) == "add"

    # A restart: the new zygote gets its models from the home.
    daemon.stop()
    daemon.start()
    assert called(daemon) == "add"

    # The name alone, over HTTP too, keeps it; a file is not named there.
    route = f"{url(daemon)}/v1/warmd/models/load"
    found = httpx.post(route, json={"name": "mine"}, headers={"X-Warmd": "1"}, timeout=60)
    assert found.json()["response_template"] == str(file)
    body = {"name": "mine", "response_template": "/etc/passwd"}
    found = httpx.post(route, json=body, headers={"X-Warmd": "1"}, timeout=60)
    assert (found.status_code, found.json()["error"]["param"]) == (400, "response_template")

    # A changed file is read again, by the next job.
    text = json.dumps(FAMILY).replace("<call>", "<other>")
    file.write_text(text)
    assert ask(daemon, seed=1).choices[0].message.tool_calls is None
    file.write_text(json.dumps(FAMILY))
    assert called(daemon) == "add"

    # A file that is none is refused in one line; the model stays as it was.
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps({**FAMILY, "fields": {"calls": {}}}))
    done = load(daemon, "mine", "--response-template", str(wrong))
    assert done.is_refusal(1), (done.code, done.err)
    assert "wrong.json: fields must be parts of a message" in done.err
    assert called(daemon) == "add"

    # An expression that would take hours ends the request, by name.
    bomb = tmp_path / "bomb.json"
    bomb.write_text(json.dumps({"start_anchor_pattern": "(?:a|aa)+$", "fields": FAMILY["fields"]}))
    assert load(daemon, "mine", "--response-template", str(bomb)).code == 0
    with pytest.raises(openai.BadRequestError, match="messages: the regular expressions of the"):
        ask(daemon, messages=[{"role": "user", "content": f"{'a' * 60}!"}])
    assert warmd("models", "--unload", "mine", home=home).code == 0


def test_a_file_that_replaces_another_template_is_named(daemon, model, tmp_path):
    file, folder = tmp_path / "family.json", tmp_path / "own"
    file.write_text(json.dumps(FAMILY))
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model)
    gguf_models.make(folder, "qwen2", "qwen2")
    tokenizer.chat_template = tool_chats.source_of("qwen3")
    tokenizer.save_pretrained(folder)
    done = load(daemon, f"own={folder}", "--response-template", str(file))
    assert (done.code, done.err.count("instead of TRL's for its chat template")) == (0, 1)
    tokenizer.response_template = FAMILY
    tokenizer.save_pretrained(folder)
    done = load(daemon, "own")
    assert (done.code, done.err.count("instead of its tokenizer's own")) == (0, 1)
    done = load(daemon, f"a={folder}", f"b={folder}", "--response-template", str(file))
    assert done.is_refusal(2)
    assert "response_template: must go with one model, got 2" in done.err
    assert warmd("models", "--unload", "own", home=daemon.home.path).code == 0


def test_tokens_over_http_are_the_tokenizers(daemon, model):
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model)
    assert load(daemon, f"mine={model}").code == 0
    messages = [{"role": "user", "content": "1+2?"}, {"role": "assistant", "content": "3"}]
    bodies: list[tuple[dict[str, Any], Any]] = [
        ({"prompt": "1+2=<call>"}, tokenizer("1+2=<call>")["input_ids"]),
        *(
            (
                {"messages": messages, "tools": tools, "add_generation_prompt": is_asked},
                tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=is_asked, return_dict=False
                ),
            )
            for tools in (None, tool_chats.TOOLS)
            for is_asked in (True, False)
        ),
    ]
    for body, expected in bodies:
        given = {"model": "mine", "return_token_strs": True, **body}
        found = httpx.post(f"{url(daemon)}/tokenize", json=given, timeout=60).json()
        assert found == {
            "count": len(expected),
            "max_model_len": 512,
            "tokens": expected,
            "token_strs": tokenizer.convert_ids_to_tokens(expected),
        }
        given = {"model": "mine", "tokens": expected}
        back = httpx.post(f"{url(daemon)}/detokenize", json=given, timeout=60).json()
        assert back == {"prompt": tokenizer.decode(expected)}
    for path, body, param in (
        ("tokenize", {"prompt": "a" * 1_000_000}, "prompt"),
        ("detokenize", {"tokens": [5, 100_000]}, "tokens"),
    ):
        given = {"model": "mine", **body}
        answer = httpx.post(f"{url(daemon)}/{path}", json=given, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
