"""Grammars of completions with tool calls, whose arguments follow the schemas of the tools.

The form is found by rendering a call: what stands before the name, between name and arguments, and
behind. Arguments must be JSON there, and the parser of replies must read such a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ..engine import grammar_checks, json_schemas
from ..files.chats import TOOL_CALLS, Chat, TemplateInputs
from ..models.chat_templates import ChatTemplate, render

_NAME, _KEY, _VALUE = "name_of_tool", "key_of_argument", "value_of_argument"
_ARGUMENTS = re.compile(rf'\{{\s*"{_KEY}":(?P<space>\s*)"{_VALUE}"\s*\}}')
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "tool",
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}


Tools = Sequence[Mapping[str, Any]]

_CALLS = r"call (/\s+/? call)*"  # templates separate calls by white space or nothing


class NoGrammar(Exception):
    """No grammar describes the model's calls; the message gives the reason."""


@dataclass(frozen=True)
class CallForm:
    """The texts around the name and the arguments of a call."""

    before: str
    between: str
    behind: str
    has_spaces: bool  # behind the colons and commas of arguments

    def text(self, name: str, arguments: str) -> str:
        """Return a call."""
        return f"{self.before}{name}{self.between}{arguments}{self.behind}"

    def trimmed(self, added: Iterable[str], reads: Callable[[str], bool]) -> CallForm:
        """Return the form without what a template writes before calls, such as empty reasoning.

        It begins with the last added token from which on `reads` takes a text as a call.
        """
        places = {self.before.rfind(one) for one in added} - {-1}
        for place in sorted(places, reverse=True):
            found = replace(self, before=self.before[place:])
            if reads(found.text(_NAME, "{}")):
                return found
        return self

    @classmethod
    def of(cls, template: ChatTemplate, ends: Iterable[str]) -> CallForm:
        """Find the form of a template; `ends`: texts of end tokens. Raises NoGrammar."""
        question = {"role": "user", "content": "question"}
        function = {"name": _NAME, "arguments": {_KEY: _VALUE}}
        answer = {"role": "assistant", "content": ""}
        answer[TOOL_CALLS] = [{"type": "function", "function": function}]  # type: ignore[assignment]
        inputs = TemplateInputs([_TOOL])
        begin = render(template, Chat([question], inputs))
        whole = render(template, Chat([question, answer], inputs), add_generation_prompt=False)
        # What the template writes of an answer may differ from the begin of one.
        pairs = enumerate(zip(begin, whole, strict=False))
        text = whole[next((at for at, (one, other) in pairs if one != other), len(begin)) :]
        name, arguments = text.find(_NAME), _ARGUMENTS.search(text)
        if name < 0 or arguments is None or arguments.start() < name:
            raise NoGrammar("the chat template does not write a call as its name and JSON")
        behind = text[arguments.end() :]
        for end in ends:
            behind = behind.partition(end)[0]
        between = text[name + len(_NAME) : arguments.start()]
        return cls(text[:name], between, behind, bool(arguments["space"]))


def forced(form: CallForm, tools: Tools, added: Mapping[str, int], *, is_single: bool) -> str:
    """Return the llguidance grammar of one call of the tools, or of several.

    Only one call is allowed with `is_single`, and where calls begin with plain text: there nothing
    separates a second call from text. `tools`: names and JSON Schemas of the arguments. `added`:
    the tokens by their texts that the tokenizer does not make of smaller ones. Raises SpecError for
    a schema.
    """
    calls = "call"
    if not is_single:
        with suppress(NoGrammar):
            _first_token(form, added)
            calls = _CALLS
    return _compiled(f"start: {calls}\n", form, tools, added)


def among_text(form: CallForm, tools: Tools, added: Mapping[str, int], ends: Iterable[int]) -> str:
    """Return the grammar of any text with calls in it, up to one of the tokens `ends`.

    Otherwise as `forced`. Raises NoGrammar too.
    """
    begin = _first_token(form, added)
    others = ",".join(map(str, sorted({begin, *ends})))
    rules = f"start: any (call any)*\nany: (/(.|\\n)+/ | <[^{others}]>)*\n"
    return _compiled(rules, form, tools, added)


def or_json(form: CallForm, tools: Tools, added: Mapping[str, int], schema: str) -> str:
    """Return the grammar of either JSON that follows `schema`, or calls. Raises as `among_text`."""
    _first_token(form, added)
    answer = json.loads(json_schemas.narrowed(schema)) | _spelling()
    rules = f"start: answer | {_CALLS}\nanswer: %json {json.dumps(answer)}\n"
    return _compiled(rules, form, tools, added)


def _first_token(form: CallForm, added: Mapping[str, int]) -> int:
    """Return the token with which a call begins, and no text. Raises NoGrammar."""
    for text, number in added.items():
        if form.before.startswith(text):
            return number
    raise NoGrammar("the model's calls begin with plain text, not with a token of their own")


def _compiled(rules: str, form: CallForm, tools: Tools, added: Mapping[str, int]) -> str:
    """Return the grammar of rules that name `call`."""
    from llguidance import LLMatcher

    plain = f"start: call\n{_lark(form, tools, {})}"
    grammar_checks.check(LLMatcher.grammar_from_lark(plain), plain, "tools")
    found: str = LLMatcher.grammar_from_lark(rules + _lark(form, tools, added))
    return found


def _lark(form: CallForm, tools: Tools, added: Mapping[str, int]) -> str:
    """Return the rules of `call`, a call of one of the tools."""
    rules, names = [], []
    for number, tool in enumerate(tools):
        schema = json.loads(json_schemas.narrowed(json.dumps(tool["parameters"]), "tools"))
        schema |= _spelling(" " if form.has_spaces else "")
        before = _literal(f"{form.before}{tool['name']}{form.between}", added)
        names.append(f"call_{number}")
        rules.append(f"call_{number}: {before} args_{number} {_literal(form.behind, added)}")
        rules.append(f"args_{number}: %json {json.dumps(schema)}")
    return "\n".join([f"call: {' | '.join(names)}", *rules]) + "\n"


def _spelling(space: str = "") -> dict[str, Any]:
    """Return llguidance's settings of JSON with `space` behind colons and commas."""
    settings = {
        "whitespace_flexible": False,
        "item_separator": f",{space}",
        "key_separator": f":{space}",
        "json_allowed_escapes": json_schemas.ESCAPES,
    }
    return {"x-guidance": settings}


def _literal(text: str, added: Mapping[str, int]) -> str:
    """Return a text in Lark's syntax, with added tokens by their ids."""
    if not text:
        return ""
    if not added:
        return json.dumps(text, ensure_ascii=False)
    pattern = "|".join(map(re.escape, sorted(added, key=len, reverse=True)))
    parts = re.split(f"({pattern})", text)
    return " ".join(
        f"<[{added[part]}]>" if part in added else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )
