"""Chat templates (Jinja programs of a model), rendered within limits on time and memory.

Rendering happens in a separate process (template_renderer.py): one operation of a template, such as
`'a' * 10**10`, can take all memory.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ..errors import JobFailed, SpecError
from ..files.chats import ARGUMENTS, NAME, REASONING, TOOL_CALLS, TOOL_ROLE, TOOLS, Chat
from ..user_code.limited_processes import LimitedProcesses

LIMIT_S = 10.0  # a template takes milliseconds

NO_TEMPLATE = ("chat_template", "the tokenizer of this model has none")  # option, problem

_MOST_SHOWN = 1000  # characters of a prompt
_processes = LimitedProcesses(f"{__package__}.template_renderer")


@dataclass(frozen=True)
class ChatTemplate:
    """The source of a template, and the special tokens by their names, such as eos_token."""

    source: str
    special_tokens: Mapping[str, str]
    source_with_tools: str | None = None  # for chats with tools; None: the same

    @classmethod
    def of(cls, tokenizer: Any) -> ChatTemplate:
        """The template that a tokenizer of transformers uses."""
        source, with_tools = (tokenizer.get_chat_template(tools=tools) for tools in (None, ()))
        return cls.of_sources(source, with_tools, tokenizer.special_tokens_map)

    @classmethod
    def of_sources(
        cls, source: str, with_tools: str | None, special_tokens: Mapping[str, str]
    ) -> ChatTemplate:
        """The template with a further one for tools, if that differs."""
        return cls(source, special_tokens, None if with_tools == source else with_tools)

    def replaced(self, source: str) -> ChatTemplate:
        """The template with another source for all chats."""
        return ChatTemplate(source, self.special_tokens)

    def source_for(self, parts: Collection[str]) -> str:
        """Return the source that renders a chat with these parts (Chat.parts)."""
        return self.source_with_tools or self.source if TOOLS in parts else self.source


def chat_template_of(tokenizer: Any) -> ChatTemplate | None:
    """Return the template of a tokenizer of transformers; None if it has none."""
    return ChatTemplate.of(tokenizer) if tokenizer.chat_template else None


class TooSlow(JobFailed):
    """A template that takes longer than its limit."""


class TooLarge(JobFailed):
    """A template that needs more memory than its limit, or whose text is too long."""


class Refused(Exception):
    """A template called raise_exception, or does not use a part of the chat."""


@dataclass(frozen=True)
class Known:
    """What a template uses."""

    variables: frozenset[str]  # names that it may read from outside
    keys: frozenset[str]  # attributes and texts in it, of which some are keys of messages
    takes_tool_role: bool
    thinking_switch: str | None  # variable that changes the prompt: False for no thinking


def known_to(template: ChatTemplate, parts: Collection[str] = ()) -> Known:
    """Return what the template of a chat with these parts uses. Raises JobFailed."""
    return _known(template.source_for(parts), tuple(sorted(template.special_tokens.items())))


@lru_cache(maxsize=64)
def _known(source: str, special_tokens: tuple[tuple[str, str], ...]) -> Known:
    request = {"source": source, "special_tokens": dict(special_tokens), "about": True}
    answer = _answer(request, "chat_template", LIMIT_S)
    return Known(
        frozenset(answer["variables"]),
        frozenset(answer["keys"]),
        answer["takes_tool_role"],
        answer["thinking_switch"],
    )


def unused(template: ChatTemplate, parts: Collection[str]) -> tuple[str, str] | None:
    """Return the field and the problem of a part of a chat that its template does not use, or None.

    `parts`: those of Chat.parts. Leaving them out would change the chat without a word. Raises
    JobFailed for a template that cannot be read.
    """
    if not parts:
        return None
    known = known_to(template, parts)
    for part in sorted(parts):
        field, _, name = part.partition(".")
        if part == TOOLS and TOOLS not in known.variables:
            return TOOLS, "the chat template does not use them"
        if field == ARGUMENTS and name not in known.variables:
            return ARGUMENTS, f"the chat template has no variable {name}"
        if part == TOOL_ROLE and not known.takes_tool_role:
            return "messages", "the chat template does not use messages of role tool"
        if part in (TOOL_CALLS, NAME) and part not in known.keys:
            return "messages", f"the chat template does not use {part}"
        if part == REASONING[0] and known.keys.isdisjoint(REASONING):
            return "messages", f"the chat template does not use {part}"
    return None


def check_used(template: ChatTemplate, parts: Collection[str], option: str, place: str) -> None:
    """Check at submit that a template uses the parts of the chat at `place`.

    Raises SpecError. A template that cannot be read is left to the job.
    """
    with suppress(JobFailed):
        if (found := unused(template, parts)) is not None:
            raise SpecError(option, f"{place}: {found[0]}: {found[1]}")


def with_effort(chat: Chat, effort: str, template: ChatTemplate) -> Chat:
    """Return the chat with a reasoning effort, in the variable that its template has for it.

    `none` turns thinking off. Raises JobFailed, whose cause is Refused, if the template has none.
    """
    known = known_to(template, chat.parts)
    if effort == "none" and known.thinking_switch is not None:
        return chat.with_argument(known.thinking_switch, False)
    if effort != "none" and "reasoning_effort" in known.variables:
        return chat.with_argument("reasoning_effort", effort)
    problem = f"the chat template has no variable for it, got {effort}"
    raise JobFailed(f"reasoning_effort: {problem}") from Refused(problem)


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
    and JobFailed for errors of the template; its cause is Refused if it rejects the chat, or does
    not use a part of it.
    """
    parts = chat.parts
    if (found := unused(template, parts)) is not None:
        where = "" if field == found[0] else f"{found[0]}: "
        raise JobFailed(f"{field}: {where}{found[1]}") from Refused(found[1])
    request = {
        "source": template.source_for(parts),
        "special_tokens": dict(template.special_tokens),
        "chat": chat.messages,
        "tools": chat.inputs.tools,
        "arguments": dict(chat.inputs.arguments),
        "add_generation_prompt": add_generation_prompt,
    }
    text: str = _answer(request, field, LIMIT_S if limit_s is None else limit_s)["text"]
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise JobFailed(
            f"{field}: the chat template writes half of a surrogate pair, at character "
            f"{error.start}: no tokenizer takes it"
        ) from error
    return text


def _answer(request: Mapping[str, Any], field: str, limit_s: float) -> dict[str, Any]:
    """Return the answer of the process. Raises TooSlow, TooLarge and JobFailed."""
    try:
        answer = _processes.answer(dict(request), limit_s)
    except TimeoutError as error:
        raise TooSlow(f"{field}: the chat template takes longer than {limit_s:g} s") from error
    except EOFError as error:
        raise JobFailed(f"{field}: the process of the chat template ended: {error}") from error
    if "memory" in answer:
        raise TooLarge(f"{field}: the chat template {answer['memory']}")
    if "refused" in answer or "error" in answer:
        reason = answer.get("refused", answer.get("error"))
        cause = Refused(reason) if "refused" in answer else None
        raise JobFailed(f"{field}: the chat template says: {reason}") from cause
    return answer


def shown_prompt(prompt: str | Chat, template: ChatTemplate | None = None) -> str:
    """Return a prompt as the model gets it, at most 1,000 characters of it, to show it to people.

    A chat is rendered as by `rendered_prompt`.
    """
    return shown_text(rendered_prompt(prompt, template))


def rendered_prompt(prompt: str | Chat, template: ChatTemplate | None = None) -> str:
    """Return a prompt as the model gets it.

    A chat is rendered by the template; without one (a job refuses such chats) it is its messages.
    """
    text = prompt if isinstance(prompt, str) else plain_text(prompt)
    if template is not None and not isinstance(prompt, str):
        with suppress(JobFailed):  # the job tells why
            is_whole = prompt.messages[-1]["role"] == "assistant"
            text = render(template, prompt, add_generation_prompt=not is_whole)
    return text.encode(errors="replace").decode()  # its messages may have lone surrogates


def shown_text(text: str) -> str:
    """Return at most 1,000 characters of a text, to show it to people."""
    if len(text) <= _MOST_SHOWN:
        return text
    return f"{text[:_MOST_SHOWN]}… ({len(text):,} characters)"


def plain_text(chat: Chat) -> str:
    """Return the contents of a chat, a line each: what is known of it without a template."""
    return "\n".join(str(message.get("content") or "") for message in chat.messages)
