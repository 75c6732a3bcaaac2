"""Grammars of tool calls: that one is made, or that each follows the schema of its tool.

The form is found by rendering a call: what stands before the name, between name and arguments, and
behind. Arguments must be JSON there, and the parser of replies must read such a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..engine import json_schemas
from ..errors import JobFailed
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
        """Find the form of a template; `ends`: texts of end tokens. Raises JobFailed."""
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
            raise JobFailed(
                "tool_choice: must be auto or none: the chat template does not write a call as its "
                "name and JSON"
            )
        behind = text[arguments.end() :]
        for end in ends:
            behind = behind.partition(end)[0]
        between = text[name + len(_NAME) : arguments.start()]
        return cls(text[:name], between, behind, bool(arguments["space"]))


def grammar(
    form: CallForm,
    tools: Sequence[Mapping[str, Any]],
    added: Mapping[str, int],
    *,
    is_forced: bool = True,
    ends: Sequence[int] = (),
) -> str:
    """Return the llguidance grammar of a call of one of the tools.

    `tools`: names and JSON Schemas of the arguments. `added`: the tokens by their texts that the
    tokenizer does not make of smaller ones. With `is_forced` false, of any text with such calls in
    it, up to one of the tokens `ends`. Raises SpecError for a schema, and JobFailed for a form
    whose calls do not begin with a token of their own, before which any text may stand.
    """
    from llguidance import LLMatcher

    json_schemas.check_lark(_lark(form, tools, {}), "tools")
    rules = _lark(form, tools, added)
    if not is_forced:
        begin = next((one for one in added if form.before.startswith(one)), None)
        if begin is None:
            raise JobFailed(
                "tools: strict must be false with tool_choice auto: the model's calls begin with "
                "plain text, not with a token of their own"
            )
        others = ",".join(map(str, sorted({added[begin], *ends})))
        rules = rules.replace("start:", "call:", 1)
        rules += f"start: any (call any)*\nany: (/(.|\\n)+/ | <[^{others}]>)*\n"
    found: str = LLMatcher.grammar_from_lark(rules)
    return found


def _lark(form: CallForm, tools: Sequence[Mapping[str, Any]], added: Mapping[str, int]) -> str:
    rules, starts = [], []
    for number, tool in enumerate(tools):
        schema = json.loads(json_schemas.narrowed(json.dumps(tool["parameters"]), "tools"))
        space = " " if form.has_spaces else ""
        schema["x-guidance"] = {
            "whitespace_flexible": False,
            "item_separator": f",{space}",
            "key_separator": f":{space}",
            "json_allowed_escapes": json_schemas.ESCAPES,
        }
        before = _literal(f"{form.before}{tool['name']}{form.between}", added)
        starts.append(f"call_{number}")
        rules.append(f"call_{number}: {before} args_{number} {_literal(form.behind, added)}")
        rules.append(f"args_{number}: %json {json.dumps(schema)}")
    return "\n".join([f"start: {' | '.join(starts)}", *rules]) + "\n"


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
