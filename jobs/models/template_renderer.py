"""The process that renders chat templates (user_code/limited_processes.py).

A template is a program from a model's author. Its memory and time are limited here, and a failure
affects no other process. Imports neither torch nor transformers, whose rules it follows
(utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..files.chats import REASONING
from ..user_code.child_server import serve_within_limits

MEMORY_BYTES = 256 << 20  # of the process; a template takes a few times its text
MOST_CHARACTERS = 32_000_000  # of a text: more than any request may have

_SWITCHES = ("enable_thinking", "thinking")  # names that templates give to it


class Refused(Exception):
    """A template called raise_exception."""


class _Generation(Extension):
    """{% generation %} marks text of the assistant; its body is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` of templates, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace` of templates, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args  # a template may have a value of the name self
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute named {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    def raise_exception(message: str) -> None:
        raise Refused(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return environment


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
    return _environment().from_string(source)


def _text(request: Mapping[str, Any]) -> str:
    messages = []
    for message in request["chat"]:
        present = {name: value for name, value in message.items() if value is not None}
        reasoning = next((present[name] for name in REASONING if name in present), None)
        if reasoning is not None:
            present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
        messages.append(present)
    variables = {
        "documents": None,
        **request["special_tokens"],
        **request["arguments"],
        "messages": messages,
        "tools": request["tools"],
        "add_generation_prompt": request["add_generation_prompt"],
    }
    return _compiled(request["source"]).render(variables)


# What a template uses.


def _about(source: str, special_tokens: Mapping[str, str]) -> dict[str, Any]:
    """Return the names in a template, and what trials show: see chat_templates.Known."""
    environment = _environment()
    tree = environment.parse(source)
    # Those that a template also sets itself are among them.
    variables = meta.find_undeclared_variables(tree) - environment.globals.keys()
    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    texts = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    keys = attributes | {text for text in texts if text.isidentifier()}
    request = {"source": source, "special_tokens": special_tokens}
    keys -= {"name"}  # templates name functions by it
    # A template that prints whole messages has none of their keys in it.
    keys |= {key for key, chats in _TRIALS.items() if key not in keys and _differ(request, chats)}
    switches = (name for name in _SWITCHES if name in variables and _is_switch(request, name))
    return {
        "variables": sorted(variables),
        "keys": sorted(keys),
        "takes_tool_role": _takes_tool_role(request, has_calls="tool_calls" in keys),
        "thinking_switch": next(switches, None),
    }


_QUESTION = {"role": "user", "content": "a"}
_CALL: dict[str, Any] = {  # the id is of the form that Mistral's templates require
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
    ],
}

_TRIALS: dict[str, list[dict[str, Any]]] = {  # key of a message -> chats that differ in it
    "tool_calls": [
        {"chat": [_QUESTION, {**_CALL, "tool_calls": [{**_CALL["tool_calls"][0], "id": id}]}]}
        for id in ("abcdefghi", "jklmnopqr")
    ],
    "reasoning_content": [
        {"chat": [_QUESTION, {"role": "assistant", "content": "b", "reasoning_content": text}]}
        for text in ("7421", "9358")
    ],
    "name": [{"chat": [{**_QUESTION, "name": text}]} for text in ("7421", "9358")],
}


def _takes_tool_role(request: Mapping[str, Any], *, has_calls: bool) -> bool:
    """Whether the text depends on the content of a message of role tool.

    Also where the template fails at these messages: it will say so itself.
    """
    before = [_QUESTION, _CALL if has_calls else {"role": "assistant", "content": "b"}]
    result = {"role": "tool", "name": "f", "tool_call_id": "abcdefghi"}
    chats = ([*before, {**result, "content": content}] for content in ("7421", "9358"))
    return _differ(request, [{"chat": chat} for chat in chats]) is not False


def _is_switch(request: Mapping[str, Any], name: str) -> bool:
    """Whether the prompt depends on a variable: it may be one that the template sets itself."""
    arguments = ({name: value} for value in (False, True))
    variants = [{"chat": [_QUESTION], "arguments": one} for one in arguments]
    return _differ(request, variants) is True


def _differ(request: Mapping[str, Any], variants: Sequence[Mapping[str, Any]]) -> bool | None:
    """Whether the texts of two variants differ; None if one raises an error."""
    first, second = (_trial({**request, **variant}) for variant in variants)
    return None if first is None or second is None else first != second


def _trial(request: Mapping[str, Any]) -> str | None:
    """Return a text; None if the template raises an error."""
    try:
        return _text({"arguments": {}, "tools": None, "add_generation_prompt": True, **request})
    except MemoryError:
        raise
    except Exception:  # a template is a program: it raises anything
        return None


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the text, or what the template uses if that is requested (`about`).

    Otherwise the error: `refused` by the template, `memory`, or any other `error`.
    """
    try:
        if "about" in request:
            return _about(request["source"], request["special_tokens"])
        text = _text(request)
    except Refused as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"memory": f"needs more than {MEMORY_BYTES >> 20} MiB of memory"}
    except TemplateError as error:
        return {"error": str(error)}
    except Exception as error:  # a template is a program: it raises anything
        return {"error": f"{type(error).__name__}: {error}"}
    if len(text) > MOST_CHARACTERS:
        return {"memory": f"writes {len(text):,} characters, at most {MOST_CHARACTERS:,} are taken"}
    return {"text": text}


if __name__ == "__main__":
    serve_within_limits(_answer, MEMORY_BYTES)
