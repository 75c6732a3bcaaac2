"""The process that renders chat templates (user_code/limited_processes.py).

A template is a program from a model's author. Its memory and time are limited here, and a failure
affects no other process. Imports neither torch nor transformers, whose rules it follows
(utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ..user_code.child_server import serve_within_limits

MEMORY_BYTES = 256 << 20  # of the process; a template takes a few times its text
MOST_CHARACTERS = 32_000_000  # of a text: more than any request may have

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of the same part of a message


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


@lru_cache(maxsize=8)
def _compiled(source: str) -> jinja2.Template:
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
    return environment.from_string(source)


def _text(request: dict[str, Any]) -> str:
    messages = []
    for message in request["chat"]:
        present = {name: value for name, value in message.items() if value is not None}
        reasoning = next((present[name] for name in _REASONING if name in present), None)
        if reasoning is not None:
            present = {"thinking": reasoning, **present, "reasoning_content": reasoning}
        messages.append(present)
    return _compiled(request["source"]).render(
        messages=messages,
        tools=None,
        documents=None,
        add_generation_prompt=request["add_generation_prompt"],
        **request["special_tokens"],
    )


def _answer(request: dict[str, Any]) -> dict[str, str]:
    """Return the text, or the error: `refused` by the template, `memory`, or any other `error`."""
    try:
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
