"""Damage to files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def flipped(path: Path, *, step: int = 1) -> Iterator[None]:
    """Flip one bit of each byte of a file, or of every `step`-th, one after another."""
    whole = path.read_bytes()
    for place in range(0, len(whole), step):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 7
        path.write_bytes(changed)
        yield
    path.write_bytes(whole)
