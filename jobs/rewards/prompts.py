"""Tokenizes the prompts of problems: templates, chats, length limits. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import JobFailed
from ..files.chats import Chat, Messages
from ..models import chat_templates
from ..models.tokenizer_folder import TokenizerFolder
from ..models.vocabulary import Vocabulary
from .problems import Problem


@dataclass(frozen=True)
class Prompt:
    """A tokenized problem."""

    text: str
    ids: list[int]  # not empty
    answer: str | None
    row: int  # of the data it came from, to name it in messages
    is_cut: bool  # ids are the end of a longer prompt
    columns: Mapping[str, Any]  # of the row, unchanged, without its prompt
    messages: Messages | None  # input of the chat template; None: plain text


def encode(
    problems: Sequence[Problem],
    tokenizer: Any,
    vocabulary: Vocabulary,
    *,
    chat_template: bool = False,
    system: str | None = None,
    max_length: int | None = None,
) -> list[Prompt]:
    """Tokenize problems into prompts of at most `max_length` tokens, cut from the left.

    Chat messages always go through the tokenizer's chat template, plain text does if
    `chat_template`; `system` opens a chat that has no system message. Raises JobFailed naming
    the row that gives no tokens, or tokens beyond the model's vocabulary, or that the chat template
    refuses, or when there is no template.
    """
    prompts = []
    for problem in problems:
        chat = chat_of(problem, chat_template=chat_template, system=system)
        text = _text(problem, chat, tokenizer)
        # A chat template adds the special tokens itself.
        ids = tokenizer(text, add_special_tokens=chat is None)["input_ids"]
        if not ids:
            raise JobFailed(f"{field_of(problem)} has no tokens")
        is_cut = max_length is not None and len(ids) > max_length
        kept = ids[-max_length:] if is_cut and max_length is not None else ids
        vocabulary.check(field_of(problem), kept)
        prompts.append(
            Prompt(
                text=text,
                ids=kept,
                answer=problem.answer,
                row=problem.row,
                is_cut=is_cut,
                columns=problem.columns,
                messages=None if chat is None else chat.messages,
            )
        )
    return prompts


def completion_room(
    prompts: Sequence[Prompt], *, limit: int | None, requested: int | None, default: int
) -> int:
    """Return the maximum completion length in tokens, after the longest of `prompts`.

    `requested` is used unchanged; without it, `default` is reduced to the positions that remain of
    `limit` (None: no limit). Raises JobFailed naming the record that leaves too few.
    """
    length = default if requested is None else requested
    if limit is None:
        return length
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    room = limit - len(longest.ids)
    if room < (1 if requested is None else requested):
        raise JobFailed(": ".join(too_long(longest.row, len(longest.ids), limit)))
    return min(length, room)


def too_long(row: int, num_tokens: int | str, limit: int) -> tuple[str, str]:
    """Return (option, problem) for a prompt that leaves no room for its completion."""
    return (
        "max_prompt_length",
        f"the prompt of row {row} has {num_tokens} tokens and the model takes {limit} together "
        "with the completion; set a max_prompt_length, to cut it, or a smaller "
        "max_completion_length",
    )


def field_of(problem: Problem) -> str:
    """Return the field name of a prompt for error messages."""
    return f"dataset: the prompt of row {problem.row}"


def chat_of(problem: Problem, *, chat_template: bool, system: str | None) -> Chat | None:
    """Return the chat of a prompt; None for plain text."""
    if isinstance(problem.prompt, str):
        if not chat_template:
            return None
        messages = [{"role": "user", "content": problem.prompt}]
    else:
        messages = list(problem.prompt)
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return Chat(messages, problem.inputs)


def check_chats(
    found: Iterable[Problem], folder: Path, *, chat_template: bool, system: str | None
) -> None:
    """Check at submit that the template in a tokenizer's folder uses all parts of the chats.

    Raises SpecError.
    """
    seen: set[frozenset[str]] = set()
    for problem in found:
        chat = chat_of(problem, chat_template=chat_template, system=system)
        parts = frozenset[str]() if chat is None else chat.parts
        if not parts or parts in seen:
            continue
        seen.add(parts)
        if (template := TokenizerFolder(folder).chat_template()) is not None:
            place = f"the prompt of row {problem.row}"
            chat_templates.check_used(template, parts, "dataset", place)


def _text(problem: Problem, chat: Chat | None, tokenizer: Any) -> str:
    if chat is None:
        assert isinstance(problem.prompt, str)
        return problem.prompt
    if not tokenizer.chat_template:
        raise JobFailed(": ".join(chat_templates.NO_TEMPLATE))
    template = chat_templates.ChatTemplate.of(tokenizer)
    return chat_templates.render(template, chat, field=field_of(problem))
