"""Checks prompts at submit by the model's tokenizer and chat template, without transformers."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import JobFailed, SpecError
from ..files.chats import Chat
from ..models import chat_templates
from ..models.tokenizer_folder import TokenizerFolder
from ..rewards.problems import Problem
from ..rewards.prompts import chat_of, field_of, too_long

_CHECK_S = 1.0  # for rendering prompts and counting their tokens


def check_prompts(
    found: Sequence[Problem],
    folder: Path,
    *,
    chat_template: bool,
    system: str | None,
    max_prompt_length: int | None,
    max_completion_length: int | None,
) -> int:
    """Check that prompts and completions fit the model in `folder`, for at most 1 s.

    Chats are rendered by the model's template. Prompts beyond this time, and models that only
    transformers can read, are checked when the job begins. Returns the number of prompts for which
    there was no time. Raises SpecError.
    """
    until = time.monotonic() + _CHECK_S
    has_chats = chat_template or any(not isinstance(one.prompt, str) for one in found)
    files = TokenizerFolder(folder)
    if has_chats and files.lacks_chat_template():
        raise SpecError(*chat_templates.NO_TEMPLATE)
    chats = (chat_of(one, chat_template=chat_template, system=system) for one in found)
    done = _Done()
    texts = _texts(found, chats, files.chat_template() if has_chats else None, until, done)
    limit = files.positions()
    if limit is None or max_prompt_length is not None:
        for _ in texts:  # raises for chats that the template rejects
            pass
        return _left(found, done, until)
    room = limit - (max_completion_length or 1)
    longer = files.longer_than(room, texts, until=until)
    if longer is not None:
        raise SpecError(*too_long(*longer, limit))
    return _left(found, done, until)


@dataclass
class _Done:
    """How many prompts have been looked at."""

    count: int = 0


def _left(found: Sequence[Problem], done: _Done, until: float) -> int:
    return len(found) - done.count if time.monotonic() > until else 0


def unchecked(left: int, total: int) -> str | None:
    """Return a note about prompts that are left to the job; None for none."""
    if not left:
        return None
    return f"{left:,} of {total:,} prompts are not checked yet: the job checks them when it starts"


def _texts(
    found: Sequence[Problem],
    chats: Iterable[Chat | None],
    template: chat_templates.ChatTemplate | None,
    until: float,
    done: _Done,
) -> Iterator[tuple[int, str]]:
    """Yield the row and the text of each prompt, while there is time.

    Raises SpecError for a chat that the template rejects, or renders as an empty text.
    """
    for problem, chat in zip(found, chats, strict=True):
        if chat is None:
            assert isinstance(problem.prompt, str)
            done.count += 1
            yield problem.row, problem.prompt
            continue
        if template is None:
            done.count += 1
            continue
        left_s = until - time.monotonic()
        if left_s <= 0:
            return
        field = field_of(problem)
        try:
            text = chat_templates.render(template, chat, field=field, limit_s=left_s)
        except chat_templates.TooSlow:
            return
        except JobFailed as error:
            if isinstance(error.__cause__, chat_templates.Refused):
                raise SpecError("dataset", str(error).removeprefix("dataset: ")) from None
            return  # a package may be missing in this environment
        if not text:
            raise SpecError(
                "dataset",
                f"the prompt of row {problem.row} must have a token, got an empty text from the "
                "chat template",
            )
        done.count += 1
        yield problem.row, text
