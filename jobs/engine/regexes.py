"""Regular expressions for constrained decoding, read and checked at submit. Imports no torch."""

from __future__ import annotations

import re

from ..errors import SpecError
from . import grammar_checks

FIELD = "regex"
NOUN = "expression"  # in messages
_MOST_SIZE = 2**16  # characters


def grammar_of(regex: str) -> str:
    """Return the llguidance grammar of the texts that an expression matches as a whole."""
    from llguidance import LLMatcher

    grammar: str = LLMatcher.grammar_from_regex(regex)
    return grammar


def check(regex: str) -> None:
    """Check an expression. Raises SpecError, also for one that `grammar_checks` refuses."""
    if len(regex) > _MOST_SIZE:
        raise SpecError(FIELD, f"must have at most {_MOST_SIZE:,} characters, got {len(regex):,}")
    grammar_checks.check(grammar_of(regex), regex, FIELD, noun=NOUN)


def of_choices(choices: list[str]) -> str:
    """Return the expression that matches each of these texts and no other."""
    return "|".join(map(re.escape, choices))
