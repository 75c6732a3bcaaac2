"""Templates of graders: text with `{{ sample.output_text }}` and `{{ item.COLUMN }}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

from ..errors import SpecError

MOST_CHARACTERS = 100_000
_PLACE = re.compile(r"\{\{([^{}]*)\}\}")  # its name may have blanks around it
_ITEM = re.compile(r"item((?:\.\w+)+)")
_OUTPUT = "sample.output_text"


class Template:
    """A text whose places are filled in for each completion."""

    def __init__(self, option: str, field: str, text: Any, most: int) -> None:
        """`field` names the text in messages about `option`; `most`: characters once filled in.

        Raises SpecError.
        """
        if not isinstance(text, str) or len(text) > MOST_CHARACTERS:
            got = f"{len(text)} characters" if isinstance(text, str) else type(text).__name__
            raise SpecError(option, f"{field} must be text of at most {MOST_CHARACTERS}, got {got}")
        self._option, self._field, self._text, self._most = option, field, text, most
        for place in _places(text):
            if place != _OUTPUT and not _ITEM.fullmatch(place):
                raise SpecError(
                    option, f"{field} must name {_OUTPUT} or item.COLUMN, got {place[:80]!r}"
                )

    @property
    def columns(self) -> list[str]:
        """The columns of the data that it names."""
        found = (_ITEM.fullmatch(place) for place in _places(self._text))
        return [match[1].split(".")[1] for match in found if match]

    def fill(self, output: str, item: Mapping[str, Any]) -> str:
        """Return the text for a completion and its record. A value that is absent is empty.

        Raises SpecError if it becomes too long.
        """
        length = len(self._text)

        def place(match: re.Match[str]) -> str:
            nonlocal length
            found = value(match)
            length += len(found) - len(match[0])
            if length > self._most:
                problem = f"{self._field} must have at most {self._most} characters, filled in"
                raise SpecError(self._option, problem)
            return found

        def value(match: re.Match[str]) -> str:
            named = match[1].strip()
            if named == _OUTPUT:
                return output
            found: Any = item
            for name in named.split(".")[1:]:
                found = found.get(name) if isinstance(found, Mapping) else None
            if found is None or isinstance(found, str):
                return found or ""
            return orjson.dumps(found).decode()

        return _PLACE.sub(place, self._text)


def _places(text: str) -> list[str]:
    """Return the names in the places of a text."""
    return [name.strip() for name in _PLACE.findall(text)]
