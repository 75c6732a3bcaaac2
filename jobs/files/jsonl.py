"""JSONL data sets: a JSON object a line; errors name the file, the line and the field."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from ..errors import SpecError

MAX_LINE_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Place:
    """A place in a data set, for messages: the option that names the file, and what is in it."""

    option: str
    text: str  # "data.jsonl, line 3: prompt"
    line: int

    def field(self, name: str) -> Place:
        """Return the place of a field of this object."""
        return replace(self, text=f"{self.text}: {name}")

    def item(self, index: int) -> Place:
        """Return the place of an item of this list."""
        return replace(self, text=f"{self.text}[{index}]")

    def fault(self, takes: str, got: str) -> SpecError:
        """Return the error for what stands here."""
        return SpecError(self.option, f"{self.text}: must be {takes}, got {got}")


def lines(option: str, source: str, takes: str = "a JSONL file") -> Iterator[tuple[Place, bytes]]:
    """Yield the lines of a file that are not blank, with their places.

    Raises SpecError for what is no such file (`takes`: what `option` may be), for one without
    lines, and for a line of more than 16 MiB.
    """
    name = source if source and source.isprintable() else repr(source)

    def no_file(reason: object) -> SpecError:
        return SpecError(option, f"must be {takes}, got {name}: {reason}")

    number, is_empty = 0, True
    try:
        # Before opening it: opening a named pipe waits for a writer.
        if not stat.S_ISREG(Path(source).stat().st_mode):
            raise no_file("not a regular file")
        with open(source, "rb") as file:
            while line := file.readline(MAX_LINE_BYTES + 1):
                number += 1
                place = Place(option, f"{name}, line {number}", number)
                if len(line) > MAX_LINE_BYTES:
                    raise place.fault("at most 16 MiB", "more")
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # the byte order mark of Windows
                if line.strip():
                    is_empty = False
                    yield place, line
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL or a lone surrogate
        raise no_file(error.strerror if isinstance(error, OSError) else error) from None
    if is_empty:
        raise no_file("no rows in it")


def parse(line: bytes, place: Place) -> dict[str, Any]:
    """Return the JSON object of a line. Raises SpecError."""
    try:
        values = orjson.loads(line.decode())
    except UnicodeDecodeError as error:
        raise place.fault("UTF-8", f"byte 0x{line[error.start]:02x}") from None
    except orjson.JSONDecodeError as error:
        raise place.fault("a JSON object", f"{error.msg} at column {error.colno}") from None
    if not isinstance(values, dict):
        raise place.fault("a JSON object", kind_of(values))
    return values


def text(value: Any, place: Place) -> str:
    """Return a value that is text, and not blank. Raises SpecError."""
    if not isinstance(value, str):
        raise place.fault("text", kind_of(value))
    if not value.strip():
        raise place.fault("text", "an empty one")
    return value


def messages(value: Any, place: Place) -> list[dict[str, str]]:
    """Return a chat: objects of `role` and `content`, at least one. Raises SpecError."""
    if not isinstance(value, list):
        raise place.fault("chat messages", kind_of(value))
    if not value:
        raise place.fault("chat messages", "an empty list")
    return [_message(item, place.item(index)) for index, item in enumerate(value)]


def _message(value: Any, place: Place) -> dict[str, str]:
    # Nothing else is let through: leaving out tool calls in silence would change the prompt.
    if not isinstance(value, dict) or set(value) != {"role", "content"}:
        got = keys_of(value) if isinstance(value, dict) else kind_of(value)
        raise place.fault("an object of role and content", got)
    return {key: text(value[key], place.field(key)) for key in ("role", "content")}


def keys_of(value: dict[str, Any]) -> str:
    """Name the keys of an object in a few words."""
    return f"the keys {sorted(value)}"[:100]


def kind_of(value: Any) -> str:
    """Name the JSON type of a value."""
    kinds = {dict: "an object", list: "a list", str: "text", bool: "true or false"}
    return "null" if value is None else kinds.get(type(value), "a number")
