"""The process that compiles JSON Schemas (user_code/limited_processes.py).

Some schemas of a few hundred bytes need hours or all memory. Imports no torch.
"""

from __future__ import annotations

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from ..user_code.child_server import serve_within_limits


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the grammar, or the error: `not_json`, or of an `unsupported` schema."""
    try:
        if "lark" in request:
            return _checked(LLMatcher.grammar_from_lark(request["lark"]))
        # Compact: where whitespace is allowed, a model may generate it without end.
        grammar = LLMatcher.grammar_from_json_schema(
            request["schema"],
            overrides={"whitespace_flexible": False, "json_allowed_escapes": request["escapes"]},
        )
    except ValueError as error:
        return {"not_json": str(error)}
    return _checked(grammar)


def _checked(grammar: str) -> dict[str, Any]:
    is_wrong, problems = LLMatcher.validate_grammar_with_warnings(grammar)
    if is_wrong:
        return {"unsupported": problems[0]}
    # A valid grammar may still accept no text.
    matcher = LLMatcher(LLTokenizer("byte"), grammar)
    matcher.compute_bitmask()
    return {"unsupported": matcher.get_error()} if matcher.is_error() else {"grammar": grammar}


if __name__ == "__main__":
    serve_within_limits(_answer)
