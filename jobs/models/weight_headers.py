"""Names and shapes of a model's weights, from the headers of its safetensors files.

Imports no torch; the weights themselves are not read.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson


def tensors(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the header's entry of every tensor in a folder's safetensors files."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = orjson.loads(file.read(length))
        yield from ((name, entry) for name, entry in header.items() if name != "__metadata__")


# Exceptions for damaged files and files of another format.
_UNREADABLE = (
    *(OSError, ValueError, KeyError, TypeError, AttributeError),
    *(struct.error, MemoryError, OverflowError),
)


def count_parameters(folder: Path) -> int | None:
    """Return the number of parameters in a folder's files; None if they cannot be read."""
    try:
        return sum(math.prod(entry["shape"]) for _, entry in tensors(folder)) or None
    except _UNREADABLE:
        return None


def matrices(folder: Path) -> dict[str, int]:
    """Return the largest possible rank of a model's matrices, by the last part of a layer's name.

    Empty if the weights cannot be read: loading the model reports the reason.
    """
    ranks: dict[str, int] = {}
    try:
        for name, entry in tensors(folder):
            parts, shape = name.split("."), entry["shape"]
            if len(parts) > 1 and parts[-1] == "weight" and len(shape) == 2:
                ranks[parts[-2]] = max(ranks.get(parts[-2], 0), min(shape))
    except _UNREADABLE:
        return {}
    return ranks
