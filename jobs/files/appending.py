"""Appending to a file whole or not at all: a full disk leaves no part of a line."""

from __future__ import annotations

import os
from pathlib import Path


def append(descriptor: int, content: bytes, path: Path) -> None:
    """Append to a file that is open with O_APPEND; an error leaves it as it was.

    Raises OSError with the file's path.
    """
    end = os.fstat(descriptor).st_size
    rest = memoryview(content)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError as error:
        os.ftruncate(descriptor, end)
        raise OSError(error.errno, error.strerror, str(path)) from None
