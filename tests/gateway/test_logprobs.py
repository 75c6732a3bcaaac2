"""Log-probabilities over HTTP, with OpenAI's client: those of transformers for the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from daemons import Daemon
from gateways import openai_client
from transformers import AutoModelForCausalLM, AutoTokenizer
from waiting import wait_until

from warmd import configs
from warmd.configs.config import ModelConfig
from warmd.daemon.client import control

ROUNDING = 1e-4
DEMO = Path(configs.__path__[0]) / "demo"


@pytest.fixture(scope="module")
def openai(shared_daemon: Daemon) -> Any:
    control.load_model(shared_daemon.config, ModelConfig(name="demo", path=str(DEMO)))
    return openai_client(wait_until(lambda: shared_daemon.status()["http"]["url"]))


@pytest.fixture(scope="module")
def demo() -> tuple[Any, Any]:
    return (
        AutoModelForCausalLM.from_pretrained(DEMO).eval(),
        AutoTokenizer.from_pretrained(DEMO),
    )


def expected(demo: tuple[Any, Any], ids: list[int]) -> torch.Tensor:
    """Row t: log-probabilities of the token after ids[: t + 1]."""
    with torch.inference_mode():
        logits: torch.Tensor = demo[0](torch.tensor([ids])).logits[0]
    return logits.log_softmax(-1)


def test_an_echoed_prompt_and_its_completion_have_the_logprobs_of_transformers(openai, demo):
    ids = demo[1]("12+7=")["input_ids"]
    answer = openai.completions.create(
        model="demo", prompt="12+7=", max_tokens=2, temperature=0, logprobs=2, echo=True
    )
    (choice,) = answer.choices
    assert choice.text == "12+7=19"
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    assert found.text_offset == list(range(len(found.tokens)))
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    whole = demo[1](choice.text)["input_ids"]
    assert whole[: len(ids)] == ids
    rows = expected(demo, whole)
    for place in range(1, len(whole)):
        row = rows[place - 1]
        assert found.token_logprobs[place] == pytest.approx(float(row[whole[place]]), abs=ROUNDING)
        best = sorted(found.top_logprobs[place].values())[-2:]
        assert best == pytest.approx(sorted(row.topk(2).values.tolist()), abs=ROUNDING)


def test_lists_of_prompts_are_answered_in_their_order_as_alone(openai, demo):
    texts = ["12+7=", "3+4=", "60+9="]
    alone = [request(openai, text).choices[0].text for text in texts]
    together = request(openai, texts).choices
    assert [one.index for one in together] == [0, 1, 2]
    assert [one.text for one in together] == alone
    as_tokens = request(openai, [demo[1](text)["input_ids"] for text in texts]).choices
    assert [one.text for one in as_tokens] == alone
    twice = request(openai, texts, n=2).choices
    assert [one.text for one in twice] == [text for text in alone for _ in range(2)]
    one = request(openai, demo[1](texts[0])["input_ids"], logprobs=0)
    assert one.choices[0].text == alone[0]
    assert one.usage.prompt_tokens == len(demo[1](texts[0])["input_ids"])


def request(openai: Any, prompt: Any, **options: Any) -> Any:
    return openai.completions.create(
        model="demo", prompt=prompt, max_tokens=4, temperature=0, **options
    )


def test_a_prompt_can_be_scored_without_a_completion(openai, demo):
    ids = demo[1]("12+7=19")["input_ids"]
    answer = openai.completions.create(
        model="demo", prompt=[ids, ids[:4]], max_tokens=0, logprobs=1, echo=True
    )
    rows = expected(demo, ids)
    for choice, length in zip(answer.choices, (len(ids), 4), strict=True):
        found = choice.logprobs.token_logprobs[1:]
        wanted = [float(rows[place - 1][ids[place]]) for place in range(1, length)]
        assert found == pytest.approx(wanted, abs=ROUNDING)
    assert answer.usage.completion_tokens == 0


def test_streamed_logprobs_are_those_of_the_whole_answer(openai):
    whole = request(openai, ["12+7=", "3+4="], logprobs=3, echo=True).choices
    streamed: dict[int, dict[str, Any]] = {
        n: {"text": "", "tokens": [], "token_logprobs": [], "text_offset": []} for n in (0, 1)
    }
    for chunk in request(openai, ["12+7=", "3+4="], logprobs=3, echo=True, stream=True):
        for choice in chunk.choices:
            streamed[choice.index]["text"] += choice.text
            if choice.logprobs is not None:
                for name in ("tokens", "token_logprobs", "text_offset"):
                    streamed[choice.index][name] += getattr(choice.logprobs, name)
    for choice in whole:
        found = streamed[choice.index]
        assert found.pop("text") == choice.text
        assert found == {name: getattr(choice.logprobs, name) for name in found}


@pytest.fixture(scope="module")
def chatty(
    shared_daemon: Daemon, tmp_path_factory: pytest.TempPathFactory, demo: tuple[Any, Any]
) -> str:
    """The name of the same model with a chat template."""
    model, tokenizer = demo
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    folder = tmp_path_factory.mktemp("chatty")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    control.load_model(shared_daemon.config, ModelConfig(name="chatty", path=str(folder)))
    return "chatty"


@pytest.mark.slow
def test_chats_have_logprobs_whole_and_streamed(openai, chatty, demo):
    tokenizer = demo[1]
    requested: dict[str, Any] = {
        "model": chatty,
        "messages": [{"role": "user", "content": "12+7="}],
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 2,
    }
    choice = openai.chat.completions.create(**requested).choices[0]
    content = choice.logprobs.content
    assert "".join(one.token for one in content) == choice.message.content
    assert [bytes(one.bytes).decode() for one in content] == [one.token for one in content]
    ids = tokenizer("12+7=", add_special_tokens=False)["input_ids"]
    ids += tokenizer(choice.message.content, add_special_tokens=False)["input_ids"]
    rows = expected(demo, ids)
    before = len(ids) - len(content) + 1  # the end token is the last of `content`
    for place, one in enumerate(content[:-1], start=before):
        assert one.logprob == pytest.approx(float(rows[place - 1][ids[place]]), abs=ROUNDING)
        assert [len(content[0].top_logprobs), one.top_logprobs[0].token] == [2, one.token]
    streamed = [
        one
        for chunk in openai.chat.completions.create(**requested, stream=True)
        for part in chunk.choices
        if part.logprobs is not None
        for one in part.logprobs.content
    ]
    assert [one.logprob for one in streamed] == [one.logprob for one in content]


def test_the_tokens_of_a_stop_string_are_in_no_logprobs(openai):
    asked = {"model": "demo", "prompt": ["12+7=", "35+7="], "temperature": 0, "max_tokens": 4}
    for options in ({"n": 2}, {"echo": True}):
        wanted = {"stop": ["9", "2"], "logprobs": 2, **asked, **options}
        choices = openai.completions.create(**wanted).choices
        assert {choice.finish_reason for choice in choices} == {"stop"}
        texts = [choice.text for choice in choices]
        assert ["".join(choice.logprobs.tokens) for choice in choices] == texts
        streamed = [["", ""] for _ in choices]
        for chunk in openai.completions.create(**wanted, stream=True):
            for choice in chunk.choices:
                streamed[choice.index][0] += choice.text
                if choice.logprobs is not None:
                    streamed[choice.index][1] += "".join(choice.logprobs.tokens)
                assert streamed[choice.index][0].startswith(streamed[choice.index][1])
        assert streamed == [[text, text] for text in texts]


def test_the_tokens_of_a_stop_string_are_in_no_logprobs_of_a_chat(openai, chatty):
    messages = [{"role": "user", "content": "12+7="}]
    wanted = {"model": chatty, "messages": messages, "temperature": 0, "max_tokens": 6}
    wanted |= {"logprobs": True, "top_logprobs": 2}
    (whole,) = openai.chat.completions.create(**wanted).choices
    wanted["stop"] = [whole.message.content[1:]]
    assert wanted["stop"] != [""]
    (choice,) = openai.chat.completions.create(**wanted).choices
    assert (choice.message.content, choice.finish_reason) == (whole.message.content[:1], "stop")
    assert [one.token for one in choice.logprobs.content] == [choice.message.content]
    chunks = [
        part
        for chunk in openai.chat.completions.create(**wanted, stream=True)
        for part in chunk.choices
    ]
    assert "".join(part.delta.content or "" for part in chunks) == choice.message.content
    entries = [one for part in chunks if part.logprobs for one in part.logprobs.content]
    assert entries == choice.logprobs.content
