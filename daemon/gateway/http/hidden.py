"""Hidden folders: responses have the names HOME and RUNS instead of their paths."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_names: dict[str, str] = {}  # path -> name; one home per process


def hide(folders: Mapping[Path, str]) -> None:
    """Set the hidden folders, and the name that responses have instead of each."""
    _names.clear()
    _names.update((str(path), name) for path, name in folders.items())


def without_paths(value: Any) -> Any:
    """Return a JSON value whose strings (not its keys) have names instead of hidden folders."""
    if isinstance(value, str):
        for path, name in _names.items():
            value = value.replace(path, name)
        return value
    if isinstance(value, list | tuple):
        return [without_paths(one) for one in value]
    if isinstance(value, dict):
        return {key: without_paths(one) for key, one in value.items()}
    return value
