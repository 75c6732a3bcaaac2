"""Journals: append-only files of records, cut to what a job keeps of them when it resumes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, Self

import orjson

from . import umask
from .appending import append, sync


class Journal:
    """A file of records, open for appending; what follows its first `kept` bytes is removed.

    `is_users`: a new file gets the umask of the user (see `umask`). Raises OSError.
    """

    def __init__(self, path: Path, kept: int, *, is_users: bool = False) -> None:
        self.path = path
        opener = umask.for_user if is_users else None
        self._file = open(path, "ab", buffering=0, opener=opener)  # noqa: SIM115  (closed by close)
        self._file.truncate(kept)

    def write(self, content: bytes, *, is_durable: bool = False) -> None:
        """Append records, whole or not at all; `is_durable`: flush them. Raises OSError."""
        append(self.fileno(), content, self.path, is_durable=is_durable)

    def sync(self) -> None:
        """Flush the records to the disk. Raises OSError."""
        sync(self.fileno(), self.path)

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lines(path: Path) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the object of each line and the offset of its end, in bytes.

    Ends at the first line that is incomplete or damaged, by a crash. Raises OSError.
    """
    end = 0
    with path.open("rb") as file:
        for line in file:
            row = None
            if line.endswith(b"\n"):
                with suppress(orjson.JSONDecodeError):
                    row = orjson.loads(line)
            if not isinstance(row, dict):
                return
            end += len(line)
            yield row, end


def begins_with(path: Path, head: bytes) -> bool:
    """Whether a file begins with `head`, or a crash has left a part of it, or nothing but zeros.

    Raises OSError.
    """
    with path.open("rb") as file:
        found = file.read(len(head))
        rest = iter(lambda: file.read(1 << 20), b"")
        return head.startswith(found) or not any(part.strip(b"\0") for part in chain([found], rest))
