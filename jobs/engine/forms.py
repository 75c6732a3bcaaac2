"""The form of constrained completions: JSON of a schema, or a match of a regular expression."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import json_schemas, regexes

if TYPE_CHECKING:
    from .engine import Engine
    from .grammar import Grammar


def check(*, json_schema: str = "", regex: str = "") -> None:
    """Check a form in a process with limits. Raises SpecError.

    A form that passes compiles within milliseconds; decoding with it can still exceed a limit of
    the parser, which fails the request (JobFailed).
    """
    if json_schema:
        json_schemas.check(json_schema)
    if regex:
        regexes.check(regex)


def grammar_of(engine: Engine, *, json_schema: str = "", regex: str = "") -> Grammar | None:
    """Return the grammar of a form that was checked; None for any text. Raises JobFailed."""
    if regex:
        return engine.grammar(regexes.grammar_of(regex), regexes.FIELD, noun=regexes.NOUN)
    if json_schema:
        return engine.grammar(json_schemas.grammar_of(json_schema), json_schemas.FIELD)
    return None
