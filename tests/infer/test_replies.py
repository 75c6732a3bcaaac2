"""Messages in completions, compared with transformers' own parser."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import trl.chat_template_utils as trl
from breadth import mostly_slow
from transformers.utils.chat_parsing import parse_response

from warmd.jobs.models.replies import Delta, Reply

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
            },
        },
    }
]
QWEN = "<|im_start|>assistant\n"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
XML_CALL = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx y\n"
    "</parameter>\n</function>\n</tool_call>"
)
GLM_CALL = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
    "<arg_value>x</arg_value>\n</tool_call>"
)
# By TRL's name of the description: the prompt's end, the end token, and completions of the family.
FAMILIES: dict[str, tuple[str, str, list[str]]] = {
    "qwen3_template": (
        QWEN,
        "<|im_end|>",
        [CALL, f"{CALL}\n{CALL}", f"Let me add.\n{CALL}", f"<think>\nhm\n</think>\n\n{CALL}"],
    ),
    "qwen3_5_template": (
        f"{QWEN}<think>\n",
        "<|im_end|>",
        [
            f"hm\n</think>\n\n{XML_CALL}",
            f"hm</think>yes\n{XML_CALL}\n{XML_CALL}",
            "hm\n</think>\n\nno",
        ],
    ),
    "llama3_template": (
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|>",
        ['{"name": "add", "parameters": {"a": 1, "b": "x"}}'],
    ),
    "glm4moe_template": (
        "<|assistant|>",
        "<|user|>",
        [f"\n<think>hm</think>\nyes\n{GLM_CALL}", f"\n<think></think>\n{GLM_CALL}"],
    ),
    "gptoss_template": (
        "<|start|>assistant",
        "<|return|>",
        ["<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"],
    ),
    "deepseek_r1_distill_template": (
        "<\uff5cAssistant\uff5c><think>\n",
        "<\uff5cend\u2581of\u2581sentence\uff5c>",
        ["hm</think>yes"],
    ),
}
MALFORMED = [
    '<tool_call>\n{"name": "add", "arguments": {"a": 1,}}\n</tool_call> after',
    '<tool_call>\n{"name": "add", "argum',
    "<tool_call>\n[1]\n</tool_call>",
    '<tool_call>\n{"name": 3}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": NaN}}\n</tool_call>',
    '<tool_call>\n{"name": "add", "arguments": {"a": "\\ud800"}}\n</tool_call>',
    '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>',
    "<tool_call>",
    f"{CALL} and <tool_call>no</tool_call>",
    f"{CALL}<tool_call>no</tool_call>",
    f"{CALL}\n<tool_call>\n{{",
    f"{CALL}<tool_call",
]


class Letters:
    """A tokenizer whose tokens are the prompt and the end."""

    def __init__(self, prompt: str, end: str) -> None:
        self.eos_token = end
        self._texts = [prompt, end]

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(self._texts[token] for token in tokens)


def told(name: str, text: str, seed: int = 0, **how: Any) -> Delta:
    """The message of a completion that arrives in random parts."""
    prompt, end, _ = FAMILIES[name]
    reply = Reply(
        getattr(trl, name), Letters(prompt, end), [0], how.pop("tools", TOOLS), seed="job", **how
    )
    parts, place = random.Random(seed), 0
    longest = (1, 3, 10, 1000)[seed % 4]
    found = Delta()
    while place < len(text):
        size = parts.randint(1, longest)
        found.add(reply.add(text[place : place + size]))
        place += size
    found.add(reply.finish(1, is_whole=True))
    assert found == reply.told
    return found


def cases() -> list[tuple[str, str]]:
    """Texts of each family: its own, cut at random places, and with noise: 20 of each."""
    found = []
    for name, (_, _, texts) in FAMILIES.items():
        chosen = random.Random(name)
        for number in range(20):
            text = chosen.choice(texts)
            if number >= len(texts):
                cut = chosen.randrange(len(text))
                text = chosen.choice([text[:cut], text[:cut] + "{x" + text[cut:], text + " ok"])
            found.append((name, text))
    return found


def without(end: str, text: str) -> str:
    """Cut the end token, which transformers leaves in a part that nothing else has closed."""
    return text.removesuffix(end).rstrip() if text.endswith(end) else text


@pytest.mark.parametrize("name", mostly_slow(FAMILIES, but=("qwen3_template", "gptoss_template")))
def test_a_message_is_that_of_transformers_however_it_arrives(name: str):
    prompt, end, _ = FAMILIES[name]
    for text in (text for family, text in cases() if family == name):
        found = [told(name, text, seed) for seed in range(8)]
        assert all(one == found[0] for one in found)
        try:
            expected = parse_response(text + end, getattr(trl, name), prefix=prompt, tools=TOOLS)
            calls = [call["function"] for call in expected.get("tool_calls", ())]
            assert all(isinstance(c.get("arguments", {}), dict) and "name" in c for c in calls)
        except Exception:  # of any type, where it cannot read a call
            assert text[-4:] in found[0].content
            continue
        reasoning = expected.get("reasoning_content", expected.get("thinking", ""))
        assert found[0].reasoning == without(end, reasoning)
        content = without(end, expected.get("content", ""))
        assert found[0].content.endswith(content)  # it keeps the last text only
        assert [one["name"] for one in found[0].calls] == [call["name"] for call in calls]
        arguments = [json.loads(one["arguments"]) for one in found[0].calls]
        assert arguments == [call.get("arguments", {}) for call in calls]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_call_stays_text(text: str):
    found = [told("qwen3_template", text, seed) for seed in range(8)]
    assert all(one == found[0] for one in found)
    assert found[0].content == text.removeprefix(CALL).strip()
    assert len(found[0].calls) == text.startswith(CALL)


def test_arguments_keep_integers_of_any_size():
    number = 10**30 + 7
    call = f'<tool_call>\n{{"name": "add", "arguments": {{"a": {number}}}}}\n</tool_call>'
    assert json.loads(told("qwen3_template", call).calls[0]["arguments"]) == {"a": number}


def test_without_tools_a_call_stays_text():
    assert told("qwen3_template", f"yes {CALL}", tools=None) == Delta(f"yes {CALL}")


def test_what_follows_the_first_call_is_left_out_where_one_is_allowed():
    for rest in (f" no {CALL}", "<tool_call>no</tool_call>", f"{CALL} <tool_call>{{"):
        found = [told("qwen3_template", f"yes {CALL}{rest}", n, is_single=True) for n in range(8)]
        assert {(one.content, len(one.calls)) for one in found} == {("yes", 1)}


def test_ids_of_calls_follow_from_the_job():
    first, second = (told("qwen3_template", f"{CALL}{CALL}", seed).calls for seed in (0, 1))
    assert first == second
    assert len({call["id"] for call in first}) == 2


def test_sorted_ids_have_the_order_of_the_calls():
    """smolagents gives the model the results of parallel calls in the order of the ids."""
    ids = [call["id"] for call in told("qwen3_template", CALL * 40).calls]
    assert len(ids) == 40
    assert ids == sorted(ids)


@pytest.mark.parametrize("end", ["<|endoftext|>", "</s>"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_end_token_that_the_family_does_not_know_is_no_text(name: str, end: str):
    """As of a base model, whose tokenizer ends a text otherwise than its chat template."""
    prompt, own, texts = FAMILIES[name]
    for text in (*texts, "no", f"{texts[0]} no "):
        found = []
        for token in (end, own):
            reply = Reply(getattr(trl, name), Letters(prompt, token), [0], TOOLS, seed="job")
            reply.add(text)
            reply.finish(1, is_whole=True)
            found.append(reply.told)
        assert end not in found[0].content + found[0].reasoning
        if not text.endswith(("</arg_value>", "}")):  # the end of a call, to some families
            assert found[0] == found[1], text
