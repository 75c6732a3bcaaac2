"""Chat templates (Jinja programs of a model), rendered within a time limit.

A job renders with its tokenizer. Before a job is queued there is none, since transformers takes
seconds to import: FolderTemplate renders what a model folder holds, in the same environment.
"""

from __future__ import annotations

import ctypes
import json
import threading
from concurrent.futures import Future
from datetime import datetime
from typing import Any, Protocol

from ..errors import JobFailed

LIMIT_S = 10.0  # a template takes milliseconds

NO_TEMPLATE = ("chat_template", "the tokenizer of this model has none")  # option, problem

Chat = list[dict[str, Any]]


class Renders(Protocol):
    """A tokenizer, or what renders as one does."""

    def apply_chat_template(
        self, conversation: Chat, /, *, add_generation_prompt: bool, tokenize: bool
    ) -> Any: ...


class TooSlow(JobFailed):
    """A template that takes longer than its limit."""


class _TimeIsUp(SystemExit):
    """Ends a thread; threads report nothing of a SystemExit."""


def render(
    tokenizer: Renders, chat: Chat, *, field: str = "messages", limit_s: float | None = None
) -> str:
    """Return a chat as the tokenizer's template has it, up to where the answer begins.

    `field` opens the message of an error. `limit_s` defaults to LIMIT_S. Raises TooSlow after
    that time, and JobFailed for what the template raises.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    rendered: Future[str] = Future()
    # In a separate thread, because the exception that ends it may arrive late.
    thread = threading.Thread(
        target=_render, args=(tokenizer, chat, rendered), name="chat template", daemon=True
    )
    thread.start()
    try:
        return rendered.result(limit_s)
    except TimeoutError as error:
        _end(thread)
        raise TooSlow(f"{field}: the chat template takes longer than {limit_s:g} s") from error
    except Exception as error:  # "roles must alternate", say; a program raises anything
        raise JobFailed(f"{field}: the chat template says: {_in_words(error)}") from error


class FolderTemplate:
    """The chat template of a model folder, rendered as transformers does, but without it."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """`special_tokens`: by the names that templates have for them, such as eos_token.

        Raises jinja2.TemplateError for what is not a template.
        """
        self._template = _environment().from_string(source)
        self._special_tokens = special_tokens

    def apply_chat_template(
        self, conversation: Chat, /, *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert not tokenize
        text: str = self._template.render(
            messages=conversation,
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self._special_tokens,
        )
        return text


class Refused(Exception):
    """A template called raise_exception. The tokenizer's own raises a TemplateError."""


def _environment() -> Any:
    """Return a Jinja environment equal to that of transformers (utils/chat_template_utils.py)."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} marks what an assistant wrote; its body is rendered as it stands."""

        tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def raise_exception(message: str) -> None:
        raise Refused(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(format: str) -> str:
        return datetime.now().strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


def _render(tokenizer: Renders, chat: Chat, rendered: Future[str]) -> None:
    try:
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except BaseException as error:
        rendered.set_exception(error)
    else:
        rendered.set_result(text)


def _end(thread: threading.Thread) -> None:
    """Raise _TimeIsUp in a thread, at the next step of its Python."""
    assert thread.ident is not None
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeIsUp)
    )


def _in_words(error: Exception) -> str:
    import jinja2

    if isinstance(error, jinja2.TemplateError | Refused):
        return str(error)
    return f"{type(error).__name__}: {error}"
