"""From problems to the tokens a model reads: templates, chat, lengths. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import JobFailed
from .problems import Problem


@dataclass(frozen=True)
class Prompt:
    """A problem as one model sees it."""

    text: str
    ids: list[int]  # not empty
    answer: str | None
    row: int  # of the data it came from, to name it in messages
    is_cut: bool  # ids are the end of a longer prompt


def encode(
    problems: Sequence[Problem],
    tokenizer: Any,
    *,
    chat_template: bool = False,
    system: str | None = None,
    max_length: int | None = None,
) -> list[Prompt]:
    """Turn problems into prompts of at most `max_length` tokens, cut from the left.

    Chat messages always go through the tokenizer's chat template, plain text does if
    `chat_template`; `system` opens a chat that has no system message. Raises JobFailed naming
    the row that gives no tokens, or when there is no chat template.
    """
    prompts = []
    for problem in problems:
        text, is_chat = _render(problem, tokenizer, chat_template=chat_template, system=system)
        # A chat template writes the special tokens itself.
        ids = tokenizer(text, add_special_tokens=not is_chat)["input_ids"]
        if not ids:
            raise JobFailed(f"dataset: the prompt of row {problem.row} has no tokens")
        is_cut = max_length is not None and len(ids) > max_length
        kept = ids[-max_length:] if is_cut and max_length is not None else ids
        prompts.append(Prompt(text, kept, problem.answer, problem.row, is_cut))
    return prompts


def completion_room(
    prompts: Sequence[Prompt], *, limit: int | None, asked: int | None, usual: int
) -> int:
    """Return how many tokens a completion may have, after the longest of `prompts`.

    `asked` is taken as it is; without it, `usual` is lowered to what `limit`, the model's
    positions (None: no limit), leaves. Raises JobFailed naming the row that leaves too few.
    """
    wanted = usual if asked is None else asked
    if limit is None:
        return wanted
    longest = max(prompts, key=lambda prompt: len(prompt.ids))
    room = limit - len(longest.ids)
    if room < (1 if asked is None else asked):
        raise JobFailed(
            f"max_prompt_length: the prompt of row {longest.row} has {len(longest.ids)} tokens and "
            f"the model takes {limit} together with the completion; set a max_prompt_length, to "
            f"cut it, or a smaller max_completion_length"
        )
    return min(wanted, room)


def _render(
    problem: Problem, tokenizer: Any, *, chat_template: bool, system: str | None
) -> tuple[str, bool]:
    if isinstance(problem.prompt, str):
        if not chat_template:
            return problem.prompt, False
        messages = [{"role": "user", "content": problem.prompt}]
    else:
        messages = list(problem.prompt)
    if not tokenizer.chat_template:
        raise JobFailed("chat_template: the tokenizer of this model has none")
    if system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return text, True
