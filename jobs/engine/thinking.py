"""Thinking-token budget: after so many thinking tokens the end-of-thinking token is forced.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Thinking:
    """A thinking-token budget of a request."""

    begin: int  # id of the token that begins thinking, such as <think>
    end: int  # id of the token that ends it
    budget: int  # tokens between them, in the whole completion


class ThinkingBudget:
    """Counter of the thinking tokens of one completion."""

    def __init__(self, thinking: Thinking, prompt: Sequence[int]) -> None:
        """`prompt`: token ids; thinking is open if a chat template has begun it there."""
        self._thinking = thinking
        self._left = thinking.budget
        tags = (token for token in reversed(prompt) if token in (thinking.begin, thinking.end))
        self._is_open = next(tags, None) == thinking.begin

    @property
    def due(self) -> int | None:
        """The id of the forced next token; None: no token is forced."""
        return self._thinking.end if self._is_open and self._left <= 0 else None

    def count(self, token: int) -> None:
        """Count a token of the completion."""
        if token == self._thinking.begin:
            self._is_open = True
        elif token == self._thinking.end:
            self._is_open = False
        elif self._is_open:
            self._left -= 1
