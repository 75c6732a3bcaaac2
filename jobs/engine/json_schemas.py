"""JSON Schemas for constrained decoding, read and checked at submit. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from ..errors import SpecError
from ..spec import path_of

FIELD = "json_schema"


def text_of(given: str, folder: Path) -> str:
    """Return the text of a schema: `given` itself, or the file of that name. Raises SpecError."""
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
    """Whether a text is a schema, not a file name."""
    return given.lstrip().startswith("{")


def grammar_of(schema: str) -> str:
    """Return the llguidance grammar of a schema. Raises SpecError for an unsupported one."""
    from llguidance import LLMatcher, LLTokenizer

    try:
        # Compact: where whitespace is allowed, a model may generate it without end.
        grammar = LLMatcher.grammar_from_json_schema(
            schema, overrides={"whitespace_flexible": False}
        )
    except ValueError as error:
        raise SpecError(FIELD, f"must be JSON, got {schema[:80]!r}: {error}") from error
    is_wrong, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        raise SpecError(FIELD, unsupported(problems[0]))
    # A valid grammar may still accept no text.
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    matcher.compute_bitmask()
    if matcher.is_error():
        raise SpecError(FIELD, unsupported(matcher.get_error()))
    return grammar


def unsupported(error: str) -> str:
    """Return the message for an error of llguidance."""
    reason = error.strip().partition("\n")[0]
    if reason == "NoExtensionBias":
        reason = "no text satisfies it; does it refer to itself without end?"
    return f"unsupported schema: {reason}"
