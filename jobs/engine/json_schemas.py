"""JSON Schemas that completions keep to: read and checked where they come in. No torch."""

from __future__ import annotations

from pathlib import Path

from ..errors import SpecError
from ..spec import path_of

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
    """Return llguidance's grammar of a schema. Raises SpecError for one that it cannot enforce."""
    from llguidance import LLMatcher, LLTokenizer

    try:
        # Compact: a model that may write spaces may write them for ever.
        grammar = LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False}
        )
    except ValueError as error:
        raise SpecError(FIELD, f"must be JSON, got {schema[:80]!r}: {error}") from error
    is_wrong, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        raise SpecError(FIELD, unsupported(problems[0]))
    # What is valid may still have no first character.
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise SpecError(FIELD, unsupported(matcher.get_error()))
    return grammar


def unsupported(error: str) -> str:
    """What is said of a schema, by what llguidance says of it."""
    reason = error.strip().partition("\n")[0]
    if reason == "NoExtensionBias":
        reason = "no text satisfies it; does it refer to itself without end?"
    return f"unsupported schema: {reason}"
