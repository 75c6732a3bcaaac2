"""Damage to files."""

from __future__ import annotations

from pathlib import Path


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
