"""JSON Schemas for constrained decoding, read and checked at submit. Imports no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import SpecError
from ..models.folder_files import read_bytes
from ..spec import path_of
from . import grammar_checks

FIELD = "json_schema"
_MOST_SIZE = 2**20  # characters of a schema; large ones have 100,000

# The escapes in strings and keys. Without \uXXXX each text has one spelling only: llguidance
# compares keys as they are spelled, so that "\u0061" would be another key than "a".
ESCAPES = 'nrbtf\\"'

# What a format means, where llguidance accepts more than RFC 3339: the year 0000, February 29 of
# any year, a second 60 at any time.
_YEAR = "(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9]{2}|[1-9][0-9]{3})"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"^(?:{_YEAR}-(?:(?:0[13-9]|1[0-2])-|02-(?:[01]|2[0-8]))|{_LEAP_YEAR}-02-29)"
_PATTERNS = {"date": (_DATE,), "date-time": (_DATE, "^.{17}[0-5]"), "time": ("^.{6}[0-5]",)}
# Keywords whose values are names with schemas, and those whose values are no schemas.
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_PLAIN = ("enum", "const", "default", "examples")
_UNSPELLED = {chr(code) for code in range(32)} - set("\n\r\b\t\f")
_EXACT = 2**53  # llguidance reads bounds, and writes integers, as float64
_LEAST = -(2**63 - 2**10)  # the float64 after -2^63, at which llguidance overflows the stack
_TOO_LARGE = "must have numbers that float64 can hold, got a larger one"
_MOST_LEVELS = 100
_TOO_DEEP = f"must have at most {_MOST_LEVELS} nested levels, got more"


def text_of(field: str, given: str, folder: Path, takes: str = "a JSON Schema") -> str:
    """Return the JSON text of an option: `given` itself, or the file of that name.

    Raises SpecError.
    """
    if not given or is_json(given):
        return given
    path = path_of(field, given, folder)
    try:
        return read_bytes(path, 4 * _MOST_SIZE).decode()
    except (OSError, ValueError) as error:
        raise SpecError(
            field, f"must be {takes} or a file that holds one, got {given[:80]!r}: {error}"
        ) from error


def is_json(given: str) -> bool:
    """Whether a text is an object or a list, not a file name."""
    return given.lstrip().startswith(("{", "["))


def grammar_of(schema: str, field: str = FIELD) -> str:
    """Return the llguidance grammar of a schema. Raises SpecError, which names `field`.

    Whether llguidance can compile it in time is for `check`, at submit.
    """
    from llguidance import LLMatcher

    # Compact: where whitespace is allowed, a model may generate it without end.
    try:
        grammar: str = LLMatcher.grammar_from_json_schema(
            narrowed(schema, field),
            overrides={"whitespace_flexible": False, "json_allowed_escapes": ESCAPES},
        )
    except ValueError as error:
        raise SpecError(field, f"must be JSON, got {schema[:80]!r}: {error}") from None
    return grammar


def check(schema: str, field: str = FIELD) -> None:
    """Check a schema. Raises SpecError, which names `field`; see `grammar_checks.check`."""
    grammar_checks.check(grammar_of(schema, field), schema, field)


def narrowed(schema: str, field: str = FIELD) -> str:
    """Return a schema for llguidance whose texts all conform to the given schema.

    Raises SpecError for one that is too large, and where no such schema is known.
    """
    if len(schema) > _MOST_SIZE:
        raise SpecError(field, f"must have at most {_MOST_SIZE:,} characters, got {len(schema):,}")
    try:
        return _narrowed(schema)
    except SpecError as error:
        raise SpecError(field, error.problem) from None


def _narrowed(schema: str) -> str:
    """As `narrowed`, but naming FIELD."""
    try:
        found = json.loads(schema)
    except RecursionError:
        raise SpecError(FIELD, _TOO_DEEP) from None
    except ValueError:
        return schema  # llguidance names the place
    return json.dumps(_walked(found, _MOST_LEVELS))


def _walked(schema: Any, levels: int) -> Any:
    """Return a schema with the patterns of its formats, in all of its parts.

    Raises SpecError for an unsupported part, and for more than this number of nested levels.
    """
    if not levels:
        raise SpecError(FIELD, _TOO_DEEP)
    if isinstance(schema, list):
        return [_walked(one, levels - 1) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("patternProperties"):
        raise SpecError(FIELD, "unsupported schema: patternProperties: keys could be duplicated")
    _check_count(schema)
    _check_numbers(schema)
    walked = {name: _part(name, value, levels - 1) for name, value in schema.items()}
    for name, inwards in (("minimum", math.inf), ("maximum", -math.inf)):
        if _is_number(bound := walked.get(name)) and abs(bound) > _EXACT:
            walked[name] = _within(bound, inwards)
    given = schema.get("format")
    patterns = _PATTERNS.get(given, ()) if isinstance(given, str) else ()
    if patterns:
        further = walked.get("allOf", [])
        walked["allOf"] = [*further, *({"pattern": pattern} for pattern in patterns)]
    return walked


def _part(name: str, value: Any, levels: int) -> Any:
    if name in ("enum", "const"):
        _check_spelled(name, value)
    if name in _PLAIN:
        return value
    if name in _NAMED and isinstance(value, dict):
        return {key: _walked(one, levels) for key, one in value.items()}
    return _walked(value, levels)


def _check_spelled(name: str, value: Any) -> None:
    """Raise SpecError for a text that no completion can have, in a value of any depth."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, dict):
            pending += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            pending += one
        elif isinstance(one, str) and not _UNSPELLED.isdisjoint(one):
            raise SpecError(
                FIELD,
                f"unsupported schema: {name}: {one[:40]!r} has a control character other than "
                r"\b, \f, \n, \r and \t",
            )


def _check_count(schema: dict[str, Any]) -> None:
    """Raise SpecError for a number of properties that duplicates of one key could reach.

    Declared keys are never duplicated; two additional keys may be equal.
    """
    least, is_open = schema.get("minProperties", 0), schema.get("additionalProperties", True)
    if is_open is not False and isinstance(least, int) and least > 1:
        raise SpecError(
            FIELD,
            "unsupported schema: minProperties above 1 needs additionalProperties: false, since "
            "keys could be duplicated",
        )


def _check_numbers(schema: dict[str, Any]) -> None:
    """Raise SpecError for numbers that llguidance would change, or not survive."""
    for name in ("minimum", "maximum"):
        if _is_number(bound := schema.get(name)) and math.isinf(bound):
            raise SpecError(FIELD, _TOO_LARGE)
    for name in ("enum", "const"):
        for number in _numbers(schema.get(name)):
            if abs(number) > _EXACT and number == math.floor(number):
                raise _beyond(name, "from -2^53 to 2^53", number)
    for name in ("exclusiveMinimum", "exclusiveMaximum"):
        if _is_number(bound := schema.get(name)) and abs(bound) >= _EXACT:
            raise _beyond(name, "between -2^53 and 2^53", bound)
    if _is_number(lower := schema.get("minimum")) and lower < -(2**63):
        raise _beyond("minimum", "at least -2^63", lower)
    if _is_number(upper := schema.get("maximum")) and upper < _LEAST:
        raise _beyond("maximum", f"at least {_LEAST}", upper)


def _beyond(name: str, takes: str, got: float) -> SpecError:
    return SpecError(
        FIELD, f"unsupported schema: {name}: integers must be {takes}, got {got}"[:200]
    )


def _numbers(value: Any) -> Iterator[float]:
    """Yield all numbers in a JSON value. Raises SpecError for infinite ones."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        elif _is_number(value):
            if math.isinf(value):
                raise SpecError(FIELD, _TOO_LARGE)
            yield value


def _within(bound: float, inwards: float) -> float:
    """Return the float64 nearest to a bound that is not beyond it. `inwards`: -inf or inf."""
    try:
        found = float(bound)
    except OverflowError:
        return bound  # refused by llguidance
    if (found < bound) if inwards > 0 else (found > bound):
        found = math.nextafter(found, inwards)
    return max(int(found), _LEAST)


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
