"""A limit on the tokens that a model thinks for: at its end, the thinking is closed.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Thinking:
    """The tokens between which a model thinks, and the number of tokens that it may."""

    begin: int
    end: int
    budget: int


class ThinkingBudget:
    """What is left of the budget of one completion."""

    def __init__(self, thinking: Thinking, prompt: Sequence[int]) -> None:
        """`prompt`: its chat template may have opened the thinking."""
        self._thinking = thinking
        self._left = thinking.budget
        tags = (token for token in reversed(prompt) if token in (thinking.begin, thinking.end))
        self._is_open = next(tags, None) == thinking.begin

    @property
    def due(self) -> int | None:
        """The token that must come next; None: any may."""
        return self._thinking.end if self._is_open and self._left <= 0 else None

    def count(self, token: int) -> None:
        """Count a token of the completion."""
        if token == self._thinking.begin:
            self._is_open = True
        elif token == self._thinking.end:
            self._is_open = False
        elif self._is_open:
            self._left -= 1
