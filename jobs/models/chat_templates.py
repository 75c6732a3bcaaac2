"""Chat templates (Jinja programs of a model), rendered within a time limit.

Needs the tokenizer's libraries, no torch.
"""

from __future__ import annotations

import ctypes
import threading
from concurrent.futures import Future
from typing import Any

from ..errors import JobFailed

LIMIT_S = 10.0  # a template takes milliseconds


class _TimeIsUp(SystemExit):
    """Ends a thread; threads report nothing of a SystemExit."""


def render(tokenizer: Any, chat: list[dict[str, Any]]) -> str:
    """Render a chat with the tokenizer's template, including the generation prompt.

    Raises JobFailed for an error of the template and for one that takes longer than LIMIT_S.
    """
    rendered: Future[str] = Future()
    # In a separate thread, because the exception that ends it may arrive late.
    thread = threading.Thread(
        target=_render, args=(tokenizer, chat, rendered), name="chat template", daemon=True
    )
    thread.start()
    try:
        return rendered.result(LIMIT_S)
    except TimeoutError as error:
        _end(thread)
        raise JobFailed(f"messages: the chat template takes longer than {LIMIT_S:g} s") from error
    except Exception as error:  # "roles must alternate", say; a program raises anything
        raise JobFailed(f"messages: the chat template says: {_in_words(error)}") from error


def _render(tokenizer: Any, chat: list[dict[str, Any]], rendered: Future[str]) -> None:
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

    if isinstance(error, jinja2.TemplateError):
        return str(error)
    return f"{type(error).__name__}: {error}"
