"""How many characters a number of tokens can have: texts are measured before they are tokenized.

Tokenizing megabytes takes seconds, and other users of the tokenizer may have to wait for it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from ..errors import JobFailed

_longest: WeakKeyDictionary[Any, int] = WeakKeyDictionary()


def longest_token(tokenizer: Any) -> int:
    """Return the characters of the longest token: an upper bound of characters per token.

    A byte token is stored with one character per byte, which is at least as many.
    """
    found = _longest.get(tokenizer)
    if found is None:
        found = _longest[tokenizer] = max(map(len, tokenizer.get_vocab()))
    return found


def check_length(
    field: str, num_characters: int, tokenizer: Any, limit: int | None, name: str
) -> None:
    """Raise JobFailed for a text that certainly has more than `limit` tokens (None: no limit).

    `field` opens the message; `name` is that of the model.
    """
    if limit is None:
        return
    longest = longest_token(tokenizer)
    if num_characters > limit * longest:
        raise JobFailed(
            f"{field} must have at most {limit * longest} characters ({limit} positions of "
            f"{name}, tokens of at most {longest} characters), got {num_characters}"
        )
