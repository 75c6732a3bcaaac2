"""Sweeps and curricula by name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from ...jobs.errors import Conflict, NotFound
from ..groups.folder import KINDS, Folder, group_ids
from ..host.home import Home


def name_of(folder: Folder) -> Any:
    """Return the name of a group; None if it has none, or cannot be read."""
    with suppress(Conflict, NotFound):
        return folder.read_plan().get("name")
    return None


def named_groups(home: Home, name: str, kinds: tuple[str, ...] = KINDS) -> list[str]:
    """Return the ids of the groups with a name."""
    every = (one for kind in kinds for one in group_ids(home, kind))
    return [one for one in every if name_of(Folder(home, one)) == name]
