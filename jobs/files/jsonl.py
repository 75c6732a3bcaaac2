"""JSONL files: one JSON object per line; errors name the file, the line and the field."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import orjson

from ..errors import SpecError
from .numbers import loads

MAX_LINE_BYTES = 64 * 2**20  # a chat may have images
BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # of Windows, at the start of a file


class Place(NamedTuple):
    """A place in a data set, for messages: the option that names the file, and the position.

    A named tuple, since each record has one: making it takes a quarter of a frozen dataclass' time.
    """

    option: str
    text: str  # "data.jsonl, line 3: prompt"
    line: int  # or the row of a file without lines; from 1
    # Field -> column of the data set, where they differ: messages use the names in the file.
    columns: Mapping[str, str] | None = None

    @classmethod
    def of_line(cls, option: str, source: str | Path, number: int) -> Place:
        """Return the place of a line of a text file."""
        return cls(option, f"{shown(source)}, line {number}", number)

    @classmethod
    def of_row(cls, option: str, source: str | Path, number: int) -> Place:
        """Return the place of a row of a file without lines."""
        return cls(option, f"{shown(source)}, row {number}", number)

    def field(self, name: str) -> Place:
        """Return the place of a field of this object."""
        column = name if self.columns is None else self.columns.get(name, name)
        return Place(self.option, f"{self.text}: {column}", self.line)

    def item(self, index: int) -> Place:
        """Return the place of an item of this list."""
        return self._replace(text=f"{self.text}[{index}]")

    def fault(self, takes: str, got: str) -> SpecError:
        """Return the error for the value at this place."""
        return SpecError(self.option, f"{self.text}: must be {takes}, got {got}")


def shown(source: str | Path) -> str:
    """Return the name of a file for a message of one line."""
    name = str(source)
    return name if name and name.isprintable() else repr(name)


def lines(
    option: str, source: str | Path, on_blank: Callable[[], None] = lambda: None
) -> Iterator[tuple[Place, bytes]]:
    """Yield the lines of a file that are not blank, with their places; call `on_blank` for others.

    Raises OSError, and SpecError for a line of more than 64 MiB.
    """
    number, name = 0, shown(source)
    with open(source, "rb") as file:
        while line := file.readline(MAX_LINE_BYTES + 1):
            number += 1
            place = Place(option, f"{name}, line {number}", number)
            if len(line) > MAX_LINE_BYTES:
                raise place.fault("at most 64 MiB", "more")
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield place, line
            else:
                on_blank()


def parse(line: bytes, place: Place, reads: Callable[[bytes], Any] = loads) -> dict[str, Any]:
    """Return the JSON object of a line. Raises SpecError.

    `reads` raises orjson.JSONDecodeError.
    """
    try:
        values = reads(line)
    except orjson.JSONDecodeError as error:
        _check_encoding(line, place)
        raise place.fault("a JSON object", f"{error.msg} at column {error.colno}") from None
    if not isinstance(values, dict):
        raise place.fault("a JSON object", kind_of(values))
    return values


def _check_encoding(line: bytes, place: Place) -> None:
    try:
        line.decode()
    except UnicodeDecodeError as error:
        raise place.fault("UTF-8", f"byte 0x{line[error.start]:02x}") from None


def is_text(value: Any) -> TypeGuard[str]:
    """Whether a value is text, and not a number that keeps its digits."""
    return type(value) is str  # Digits are a class derived from it


def text(value: Any, place: Place) -> str:
    """Return a value that is text, and not blank. Raises SpecError."""
    if not is_text(value):
        raise place.fault("text", kind_of(value))
    if not value.strip():
        raise place.fault("text", "an empty one")
    return value


def keys_of(value: dict[str, Any]) -> str:
    """Name the keys of an object in a few words."""
    return f"the keys {sorted(value)}"[:100]


def kind_of(value: Any) -> str:
    """Name the JSON type of a value."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")
