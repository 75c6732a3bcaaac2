"""Folders of this machine that responses do not show: their texts have HOME and RUNS instead."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_names: dict[str, str] = {}  # path -> its name in responses; one home per process


def hide(folders: Mapping[Path, str]) -> None:
    """Set the folders that responses do not show, and the name of each."""
    _names.clear()
    _names.update((str(path), name) for path, name in folders.items())


def without_paths(value: Any) -> Any:
    """Return a JSON value with the names of hidden folders in its texts, keys left out."""
    if isinstance(value, str):
        for path, name in _names.items():
            value = value.replace(path, name)
        return value
    if isinstance(value, list | tuple):
        return [without_paths(one) for one in value]
    if isinstance(value, dict):
        return {key: without_paths(one) for key, one in value.items()}
    return value
