"""Response templates in files: what they may be, and how their expressions are limited."""

from __future__ import annotations

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import tool_chats
import trl.chat_template_utils as trl

from warmd.jobs.models import response_parser
from warmd.jobs.models.replies import Reply
from warmd.jobs.models.response_parser import SEARCH_S, TooSlow
from warmd.jobs.models.response_templates import MOST_BYTES, described, read, replaced_by_file

OF_TRL = {name: one for name, one in vars(trl).items() if name.endswith("_template") and
          isinstance(one, dict) and "fields" in one}  # fmt: skip
TOKENIZER = tool_chats.tokenizer("{{ messages }}")


def written(folder: Path, template: Any) -> Path:
    path = folder / "family.json"
    path.write_text(template if isinstance(template, str) else json.dumps(template))
    return path


def changed(*place: str, to: Any) -> dict[str, Any]:
    """Qwen 3's template with another value at a place."""
    template: dict[str, Any] = copy.deepcopy(trl.qwen3_template)
    *parents, last = place
    inside: Any = template
    for name in parents:
        inside = inside[name]
    inside[last] = to
    return template


@pytest.mark.parametrize("name", OF_TRL)
def test_templates_of_all_families_can_be_files(name: str, tmp_path: Path):
    assert read(written(tmp_path, OF_TRL[name])) == OF_TRL[name]


CALLS = ("fields", "tool_calls")
XML = {"content": "xml-inline", "content_args": {"tag_pattern": "(?P<key>a)"}, "open": "<c>"}
WRONG: list[tuple[Any, str]] = [
    ("{", "family.json: must be JSON, got"),
    ("[]", "family.json: must be a JSON object, got a list"),
    ({}, "family.json: fields must be an object, got null"),
    (changed("fields", to={"text": {}}), "family.json: fields must be parts of a message"),
    (changed("fields", "content", to=3), "family.json: fields.content must be an object, got 3"),
    (changed("version", to=2), "version: 2"),
    (changed("start_anchor", to=None), "takes, got one that it refuses: response_template:"),
    (changed("colour", to=1), "Unknown keys in response_template: ['colour']"),
    (changed(*CALLS, "colour", to=1), "Field 'tool_calls': unknown keys ['colour']"),
    (changed(*CALLS, "close_pattern", to="("), "Field 'tool_calls'"),
    (
        changed(*CALLS, "close_pattern", to=["a"]),
        "fields.tool_calls.close_pattern must be a regular expression of at most 4,096",
    ),
    (changed(*CALLS, "close_pattern", to="a" * 4097), "4,096 characters, got 4,097 characters"),
    (changed(*CALLS, "repeats", to="yes"), "tool_calls.repeats must be true or false, got 'yes'"),
    (changed(*CALLS, "content", to="yaml"), "fields.tool_calls.content must be one of text, int"),
    (changed(*CALLS, "transform", to={"name": "{name}"}), "transform must be an object with func"),
    (changed(*CALLS, "transform", to="{content}"), "transform must be an object with function"),
    (changed(*CALLS, "content_args", to=[]), "tool_calls.content_args must be an object"),
    (
        changed(*CALLS, "content_args", to={"strict": True}),
        "content_args must be arguments of json (allow_non_json, string_delims",
    ),
    (
        changed(*CALLS, "content_args", to={"string_delims": [["'"]]}),
        "content_args.string_delims must be a list of pairs of texts",
    ),
    (
        changed(*CALLS, to={**XML, "content_args": {}}),
        "content_args.tag_pattern must be a regular expression, got none",
    ),
    (
        changed(*CALLS, to={**XML, "content_args": {"tag_pattern": "a"}}),
        "must be a regular expression with a group key, got one that it refuses: 'a' has none",
    ),
    (
        changed(*CALLS, to={**XML, "content_args": {"tag_pattern": "("}}),
        "content_args.tag_pattern must be a regular expression",
    ),
    (
        changed(
            *CALLS,
            to={**XML, "content_args": {**XML["content_args"], "value_parser": {"name": "xml"}}},  # type: ignore[dict-item]
        ),
        "content_args.value_parser.content must be one of",
    ),
    (" " * (MOST_BYTES + 1), "family.json: must be a file of at most 65,536 bytes"),
]


@pytest.mark.parametrize(("template", "message"), WRONG, ids=range(len(WRONG)))
def test_what_is_no_template_is_refused_by_file_and_field(template, message, tmp_path):
    with pytest.raises(ValueError, match=r"family\.json: ") as caught:
        read(written(tmp_path, template))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_or_no_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="response_template: must be a JSON file, got /"):
        read(tmp_path / "none.json")
    with pytest.raises(ValueError, match="must be a regular file, got a folder"):
        read(tmp_path)


def test_a_given_template_goes_before_the_tokenizers_and_that_before_trls():
    class Own:
        chat_template = trl.qwen3_chat_template
        response_template = None

    tokenizer: Any = Own()
    found = described(tokenizer)
    assert found is not None
    assert found.is_of_trl
    assert found.template == trl.qwen3_template
    assert replaced_by_file(tokenizer) == "TRL's for its chat template"
    tokenizer.response_template = {"fields": {}}
    found = described(tokenizer)
    assert found is not None
    assert (found.template, found.is_of_trl) == ({"fields": {}}, False)
    assert replaced_by_file(tokenizer) == "its tokenizer's own"
    found = described(tokenizer, trl.llama3_template)
    assert found is not None
    assert (found.template, found.is_of_trl) == (trl.llama3_template, False)
    tokenizer.response_template = None
    tokenizer.chat_template = "{{ messages }}"
    assert described(tokenizer) is None
    assert replaced_by_file(tokenizer) is None


BOMB = "(?:a|aa)+$"  # its time doubles with every other character


OTHER_PLACES = pytest.mark.nightly(
    part="oracles", catches="a place of an expression whose search no time limit ends"
)


@pytest.mark.parametrize(
    "template",
    [
        changed("fields", "content", "close_pattern", to=BOMB),
        pytest.param(
            changed(*CALLS, to={"open_pattern": BOMB, "close": "</c>"}), marks=OTHER_PLACES
        ),
        pytest.param(changed("start_anchor", to="<|im_start|>"), marks=OTHER_PLACES),
        pytest.param(
            changed(*CALLS, to={**XML, "content_args": {"tag_pattern": f"(?P<key>{BOMB})"}}),
            marks=OTHER_PLACES,
        ),
        pytest.param(
            changed(
                *CALLS,
                to={
                    **XML,
                    "content_args": {
                        "tag_pattern": "(?P<key>a)(?P<value>.*)",
                        "value_parser": {
                            "name": "xml-inline",
                            "args": {"tag_pattern": f"(?P<key>{BOMB})"},
                        },
                    },
                },
            ),
            marks=OTHER_PLACES,
        ),
    ],
    ids=["close", "open", "start", "tags", "nested"],
)  # fmt: skip
def test_expressions_that_would_take_hours_end_by_name(template: Any, tmp_path: Path):
    text = "a" * 60 + "!"
    if template["start_anchor"] == "<|im_start|>":
        del template["start_anchor"]
        template["start_anchor_pattern"] = BOMB
    assert read(written(tmp_path, template)) == template  # as an expression it is sound
    begun = time.process_time()
    with pytest.raises(TooSlow, match="messages: the regular expressions of the response template"):
        told(template, text)
    assert time.process_time() - begun < SEARCH_S + 1


def told(template: Any, text: str) -> None:
    prompt = TOKENIZER(text)["input_ids"]
    reply = Reply(template, TOKENIZER, prompt, tool_chats.TOOLS, seed="")
    reply.add(f"<c>{text}</c>" if template["fields"]["tool_calls"].get("open") else text)
    reply.finish(None, is_whole=True)


@pytest.mark.slow
def test_a_completion_has_a_limit_for_all_searches_together(monkeypatch: pytest.MonkeyPatch):
    """Each search takes less than its own limit."""
    limit_s = 2.0
    monkeypatch.setattr(response_parser, "LIMIT_S", limit_s)
    template = changed("fields", "content", "close_pattern", to=f"(?:{BOMB})b")
    reply = Reply(template, TOKENIZER, [], tool_chats.TOOLS, seed="")

    def write() -> int:
        for number in range(100_000):
            reply.add("a" * 22 + "!")
            if time.process_time() - begun > 2 * limit_s:
                return number
        return 100_000

    begun = time.process_time()
    with pytest.raises(TooSlow):
        write()
    assert limit_s - 1 < time.process_time() - begun < limit_s + 1
