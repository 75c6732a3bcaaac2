"""Appending to a file: a record is written whole or, on a full disk, not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from .atomic import naming


def append(descriptor: int, content: bytes, path: Path, *, is_durable: bool = False) -> None:
    """Append to a file that is open with O_APPEND; an error leaves it as it was.

    `is_durable`: the file is also flushed to the disk. Raises OSError with the file's path.
    """
    end = os.fstat(descriptor).st_size
    rest = memoryview(content)
    try:
        with naming(path):
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        if is_durable:
            sync(descriptor, path)
    except OSError:
        with suppress(OSError):  # a broken disk cannot undo it; the first error says why
            os.ftruncate(descriptor, end)
        raise


def sync(descriptor: int, path: Path) -> None:
    """Flush the content of an open file to the disk (fdatasync). Raises OSError with its path."""
    with naming(path):
        os.fdatasync(descriptor)
