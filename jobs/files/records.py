"""Records: JSON of other processes, of Redis and of state files, as dataclasses (by msgspec).

A field that the dataclass does not have is ignored: a later version may have written it. A missing
one has its default. A value of another type makes the record unreadable: true is no integer, and
neither is 1.0; an integer is a float.

orjson parses, as for events: msgspec's parser does not check what it skips, and reads integers that
orjson cannot write. What `warmd show`, `jobs` and `result` read of a job is read without this
module: importing msgspec takes 10 ms.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import orjson

T = TypeVar("T")


def decode(content: bytes | bytearray | str, record: type[T]) -> T:
    """Return the record in a JSON document. Raises ValueError."""
    return convert(orjson.loads(content), record)


def convert(value: Any, record: type[T]) -> T:
    """Return the record in parsed JSON. Raises ValueError."""
    import msgspec  # imported here: most commands read no record

    try:
        return msgspec.convert(value, record)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def read(path: Path, record: type[T]) -> T | None:
    """Return the record in a file; None: there is no file, or it cannot be read."""
    with suppress(OSError, ValueError):
        return decode(path.read_bytes(), record)
    return None
