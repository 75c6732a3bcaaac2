"""Regular expressions for constrained decoding, read and checked at submit. Imports no torch."""

from __future__ import annotations

import re

from ..errors import SpecError
from .json_schemas import REGEX, check_grammar

FIELD = REGEX
_MOST_SIZE = 2**16  # characters


def grammar_of(regex: str) -> str:
    """Return the llguidance grammar of texts that an expression matches as a whole."""
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_regex(regex)
    return grammar


def check(regex: str) -> None:
    """Check an expression.

    Raises SpecError for an unsupported one, and for one that takes more time or memory to compile
    than a schema may.
    """
    if len(regex) > _MOST_SIZE:
        raise SpecError(FIELD, f"must have at most {_MOST_SIZE:,} characters, got {len(regex):,}")
    check_grammar(grammar_of(regex), regex, FIELD)


def of_choices(choices: list[str]) -> str:
    """Return the expression that matches some texts."""
    return "|".join(map(re.escape, choices))
