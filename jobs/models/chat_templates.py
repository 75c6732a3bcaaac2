"""Chat templates (Jinja programs of a model), rendered within limits on time and memory.

Rendering happens in a separate process (template_renderer.py): one operation of a template, such as
`'a' * 10**10`, can take all memory, and a thread cannot be interrupted in it. The process is kept
for the next chats, so that each costs a fraction of a millisecond.
"""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from select import select
from typing import Any

from ..errors import JobFailed

LIMIT_S = 10.0  # a template takes milliseconds
_START_S = 30.0  # for the process to start, on a busy machine

NO_TEMPLATE = ("chat_template", "the tokenizer of this model has none")  # option, problem

_MOST_SHOWN = 1000  # characters of a prompt
_MOST_PROCESSES = 4  # that render at the same time
_MODULE = f"{__package__}.template_renderer"

Chat = list[dict[str, Any]]


@dataclass(frozen=True)
class ChatTemplate:
    """The source of a template, and the special tokens by their names, such as eos_token."""

    source: str
    special_tokens: Mapping[str, str]

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate:
        """The template that a tokenizer of transformers uses for a chat without tools."""
        return cls(tokenizer.get_chat_template(), tokenizer.special_tokens_map)


def chat_template_of(tokenizer: Any) -> ChatTemplate | None:
    """Return the template of a tokenizer of transformers; None if it has none."""
    return ChatTemplate.of(tokenizer) if tokenizer.chat_template else None


class TooSlow(JobFailed):
    """A template that takes longer than its limit."""


class TooLarge(JobFailed):
    """A template that needs more memory than its limit, or whose text is too long."""


class Refused(Exception):
    """A template called raise_exception."""


def render(
    template: ChatTemplate,
    chat: Chat,
    *,
    field: str = "messages",
    limit_s: float | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Return a chat rendered by its template, by default up to the start of the answer.

    `field` opens the message of an error. `limit_s` defaults to LIMIT_S. Raises TooSlow, TooLarge,
    and JobFailed for errors of the template; its cause is Refused if it rejects the chat.
    """
    limit_s = LIMIT_S if limit_s is None else limit_s
    request = {
        "source": template.source,
        "special_tokens": dict(template.special_tokens),
        "chat": chat,
        "add_generation_prompt": add_generation_prompt,
        "limit_s": limit_s + 1,
    }
    with _processes.one() as process:
        try:
            answer = process.answer(request, limit_s)
        except TimeoutError as error:
            raise TooSlow(f"{field}: the chat template takes longer than {limit_s:g} s") from error
        except EOFError as error:
            raise JobFailed(f"{field}: the process of the chat template ended: {error}") from error
    if "text" in answer:
        text: str = answer["text"]
        return text
    if "memory" in answer:
        raise TooLarge(f"{field}: the chat template {answer['memory']}")
    reason = answer.get("refused", answer.get("error"))
    cause = Refused(reason) if "refused" in answer else None
    raise JobFailed(f"{field}: the chat template says: {reason}") from cause


def shown_prompt(prompt: str | Chat, template: ChatTemplate | None = None) -> str:
    """Return a prompt as the model gets it, at most 1,000 characters of it, to show it to people.

    A chat is rendered by the template; without one (a job refuses such chats) it is its messages.
    """
    text = prompt if isinstance(prompt, str) else "\n".join(str(m["content"]) for m in prompt)
    if template is not None and not isinstance(prompt, str):
        with suppress(JobFailed):  # the job tells why
            is_whole = prompt[-1]["role"] == "assistant"
            text = render(template, prompt, add_generation_prompt=not is_whole)
    text = text.encode(errors="replace").decode()  # a template may write lone surrogates
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}… ({len(text):,} characters)"


def end_processes() -> None:
    """End the idle renderers."""
    _processes.end()


class _Process:
    """A process that renders."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="ascii",
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout
        self._is_last = False

    @property
    def is_usable(self) -> bool:
        return not self._is_last and self._process.poll() is None

    def answer(self, request: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Raises TimeoutError after the limit, EOFError where the process ends."""
        with suppress(BrokenPipeError):  # it has ended: the end of its output shows it
            self._input.write(json.dumps(request) + "\n")
            self._input.flush()
        answer = self._line(limit_s)
        self._is_last = answer.pop("is_last")
        return answer

    def wait_until_ready(self) -> None:
        """Raises TimeoutError and EOFError."""
        self._line(_START_S)

    def _line(self, limit_s: float) -> dict[str, Any]:
        if not select([self._output], [], [], limit_s)[0]:
            raise TimeoutError
        line = self._output.readline()
        if not line.endswith("\n"):
            raise EOFError(f"exit code {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def end(self) -> None:
        self._process.kill()
        with suppress(BrokenPipeError), self._process:  # closes the pipes and waits
            pass


class _Processes:
    """The renderers of this process: one per concurrent rendering, and an idle one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free = threading.BoundedSemaphore(_MOST_PROCESSES)
        self._waiting: list[_Process] = []

    @contextmanager
    def one(self) -> Iterator[_Process]:
        """Yield a process for one request. It is ended if the block raises."""
        with self._free:
            process = self._taken()
            try:
                yield process
            except BaseException:
                process.end()
                raise
            with self._lock:
                if not self._waiting and process.is_usable:
                    self._waiting.append(process)
                    return
            process.end()

    def _taken(self) -> _Process:
        with self._lock:
            while self._waiting:
                process = self._waiting.pop()
                if process.is_usable:
                    return process
                process.end()
        process = _Process()
        process.wait_until_ready()
        return process

    def end(self) -> None:
        with self._lock:
            while self._waiting:
                self._waiting.pop().end()


_processes = _Processes()
atexit.register(end_processes)
