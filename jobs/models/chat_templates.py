"""Chat templates (Jinja programs of a model), rendered within limits on time and memory.

Rendering happens in a separate process (template_renderer.py): one operation of a template, such as
`'a' * 10**10`, can take all memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..errors import JobFailed
from ..user_code.limited_processes import LimitedProcesses

LIMIT_S = 10.0  # a template takes milliseconds

NO_TEMPLATE = ("chat_template", "the tokenizer of this model has none")  # option, problem

_MOST_SHOWN = 1000  # characters of a prompt
_processes = LimitedProcesses(f"{__package__}.template_renderer")

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
    }
    try:
        answer = _processes.answer(request, limit_s)
    except TimeoutError as error:
        raise TooSlow(f"{field}: the chat template takes longer than {limit_s:g} s") from error
    except EOFError as error:
        raise JobFailed(f"{field}: the process of the chat template ended: {error}") from error
    if "text" in answer:
        text: str = answer["text"]
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise JobFailed(
                f"{field}: the chat template writes half of a surrogate pair, at character "
                f"{error.start}: no tokenizer takes it"
            ) from error
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
    text = text.encode(errors="replace").decode()  # its messages may have lone surrogates
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}… ({len(text):,} characters)"
