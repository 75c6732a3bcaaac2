"""JSON Schemas that completions keep to: read and checked where they come in. No torch."""

from __future__ import annotations

from pathlib import Path

from .errors import SpecError
from .spec import path_of

FIELD = "json_schema"


def text_of(given: str, folder: Path) -> str:
    """Return the text of a schema: `given` itself, or the file that it names. Raises SpecError."""
    if not given or is_schema(given):
        return given
    path = path_of(FIELD, given, folder)
    try:
        return path.read_text()
    except (OSError, ValueError) as error:
        raise SpecError(
            FIELD, f"must be a JSON Schema or a file that holds one, got {given[:80]!r}: {error}"
        ) from error


def is_schema(given: str) -> bool:
    """Whether a text is a schema itself, and no file's name."""
    return given.lstrip().startswith("{")


def grammar_of(schema: str) -> str:
    """Return llguidance's grammar of a schema. Raises SpecError for one that it cannot hold to."""
    from llguidance import LLMatcher

    try:
        # Compact: a model that may write spaces may write them for ever.
        grammar = LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False}
        )
    except ValueError as error:
        raise SpecError(FIELD, f"must be JSON, got {schema[:80]!r}: {error}") from error
    is_wrong, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        reason = problems[0].strip().partition("\n")[0]
        raise SpecError(FIELD, f"must be a JSON Schema that can be held to, got one with: {reason}")
    return grammar
