"""JSON numbers that neither 64-bit integers nor float64 can represent: kept as text.

orjson reads an integer beyond 64 bits and a decimal of more than 17 digits as the nearest float64,
without a word. Text is made of such values (answers, columns of rewards), so here they stay as they
are written.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

# Reduces a line to 0 (digits and points), e, - and spaces, to find what may be a long number: 16
# digits or an exponent of three. Ten times as fast as a regular expression.
_SHAPES = bytes.maketrans(
    bytes(range(256)),
    bytes(
        48 if c in b"0123456789." else 101 if c in b"eE" else 45 if c in b"+-" else 32
        for c in range(256)
    ),
)
_LONG = (b"0" * 16, b"0e000", b"0e-000")
# An exponent, or all digits of a run but the first. Both take linear time, whatever the text is.
_HUGE = re.compile(rb"(?<=[0-9])[eE][+-]?[0-9]{3,}|(?<![0-9])([0-9])[0-9]{300,}")
_EXACT = frozenset((str, int, bool, type(None)))  # what orjson reads as it is written
_LONGEST_INTEGER = 20  # characters of one of 64 bits
_PLACES = 400  # at most, of a number that is written out; float64 has 309 before the point


class Digits(str):
    """The text of a number that int64, uint64 and float64 cannot represent exactly."""

    __slots__ = ()

    @property
    def plain(self) -> str:
        """The number without an exponent, unless that would take hundreds of zeros."""
        try:
            number = Decimal(self)
        except InvalidOperation:  # an exponent beyond 10**18
            return str(self)
        return f"{number:f}" if abs(number.adjusted()) <= _PLACES else str(self)


def loads(line: bytes) -> Any:
    """Return the value of a JSON text, with Digits where a number is beyond int64 and float64.

    Raises orjson.JSONDecodeError.
    """
    try:
        found = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        if "infinity" not in str(error):
            raise
        # orjson stops here at a number beyond float64. The rest of the line is read without it.
        orjson.loads(_HUGE.sub(lambda found: found[1] or b"", line))
    else:
        if not _may_have_long_numbers(found, line):
            return found
    try:
        return json.loads(line, parse_int=_integer, parse_float=_decimal)
    except RecursionError:  # orjson takes a few levels more
        raise orjson.JSONDecodeError("too many levels for a long number", "", 0) from None


def written(number: float | Digits) -> str:
    """Return a finite number as text, never in scientific notation."""
    return number.plain if isinstance(number, Digits) else f"{Decimal(str(number)):f}"


def _may_have_long_numbers(value: Any, line: bytes) -> bool:
    if isinstance(value, dict) and _EXACT.issuperset(map(type, value.values())):
        return False  # nearly all records
    shape = line.translate(_SHAPES)
    return any(long in shape for long in _LONG)


def _integer(text: str) -> int | Digits:
    if len(text) > _LONGEST_INTEGER:
        return Digits(text)
    number = int(text)
    return number if -(2**63) <= number < 2**64 else Digits(text)


def _decimal(text: str) -> float | Digits:
    number = float(text)
    try:
        is_equal = math.isfinite(number) and Decimal(text) == Decimal(repr(number))
    except InvalidOperation:
        is_equal = False
    return number if is_equal else Digits(text)
