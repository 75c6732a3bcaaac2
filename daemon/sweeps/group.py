"""The folder of a group of jobs: a plan that never changes, a state that is replaced as a whole.

A folder is complete when it appears under its name, and its lock is held for every change. It has a
file `active` while the process of groups has something to do.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import orjson

from ...jobs import stored_options
from ...jobs.errors import Conflict, NotFound
from ...jobs.files.atomic import fsync, locked, write_atomic
from ...jobs.ids import kind_of
from ..runs.seal import DAMAGED, is_whole, sealed

RUNNING, PAUSED, CANCELED = "running", "paused", "canceled"  # phases of all groups

_ID = re.compile(r"(sweep|curriculum)-\d{8}-\d{6}-[a-z0-9]{4}")
_STAGING = ".new-"
_REMOVED = ".removed-"
_PLAN, _STATE = "plan.json", "state.json"


class GroupFolder:
    """One group on disk."""

    def __init__(self, parent: Path, group_id: str) -> None:
        self.id = group_id
        self.path = parent / group_id

    @property
    def init(self) -> Path:
        """The weights that its jobs start from, if they come from another job."""
        return self.path / "init"

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep out other processes that change this group. Raises NotFound."""
        try:
            with locked(self.path):
                yield
        except FileNotFoundError:
            if self.path.is_dir():
                raise
            raise NotFound(f"{kind_of(self.id)}: {self.id} was removed") from None

    @property
    def is_active(self) -> bool:
        """Whether the process of groups has something to do."""
        return (self.path / "active").exists()

    def set_active(self, is_active: bool) -> None:
        """Set `is_active`; within `changing`."""
        if is_active:
            (self.path / "active").touch()
        else:
            (self.path / "active").unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder, but none of its jobs."""
        removed = self.path.with_name(f"{_REMOVED}{self.id}")
        with suppress(FileNotFoundError):
            self.path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def overview(self) -> dict[str, Any]:
        """Return the row of the group in a list of groups. Raises NotFound and Conflict."""
        plan, is_active = self.read_plan(), self.is_active
        with self.reading():
            return {
                "id": self.id,
                "kind": str(plan["kind"]),
                "name": plan["name"],
                "active": is_active,
                "phase": str(self.read_state()["phase"]),
                "changed_at": (self.path / _STATE).stat().st_mtime,
            }

    def read_plan(self) -> dict[str, Any]:
        """Return the content of plan.json. Raises NotFound and Conflict."""
        return self._load(_PLAN)

    def read_state(self) -> dict[str, Any]:
        """Return the content of state.json. Raises NotFound and Conflict."""
        return self._load(_STATE)

    def write_state(self, state: Mapping[str, Any]) -> None:
        """Replace state.json; within `changing`."""
        write_atomic(self.path / _STATE, sealed(state))

    def _load(self, name: str) -> dict[str, Any]:
        try:
            document = orjson.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"{kind_of(self.id)}: no {self.id!r}") from None
        except (OSError, orjson.JSONDecodeError) as error:
            raise Conflict(f"{self.path / name}: cannot be read: {error}") from error
        if not isinstance(document, dict):
            raise Conflict(f"{self.path / name}: must be a JSON object")
        if not is_whole(document):
            raise Conflict(f"{self.path / name}: {DAMAGED}")
        return document

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Turn errors about missing or wrong parts of a file into Conflict."""
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise Conflict(f"{self.path}: cannot be read: {error}") from error


def update_options(kind: str, document: dict[str, Any]) -> None:
    """Add the defaults of an earlier version, which wrote this plan, for options that are missing.

    `document`: the spec.json of the jobs that this version will queue.
    """
    document["spec"] = stored_options(kind, document["spec"])


@contextmanager
def creating(
    parent: Path, group_id: str, plan: Mapping[str, Any], state: Mapping[str, Any]
) -> Iterator[Path]:
    """Yield a temporary folder for further files; it becomes the group's at the end."""
    parent.mkdir(mode=0o700, exist_ok=True)
    staging = parent / f"{_STAGING}{group_id}"
    try:
        staging.mkdir(mode=0o700)
        (staging / "active").touch()
        write_atomic(staging / _PLAN, sealed(plan))
        write_atomic(staging / _STATE, sealed(state))
        yield staging
        staging.rename(parent / group_id)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    fsync(parent)


def is_group_id(text: str) -> bool:
    """Whether the text is a valid id of a group, which is safe in paths."""
    return _ID.fullmatch(text) is not None


def is_id_prefix(text: str) -> bool:
    """Whether the text begins the id of a group, and not a name."""
    return text.startswith(("sweep", "curriculum"))


def group_ids(parent: Path) -> list[str]:
    """Return the ids of all groups in a folder, oldest first."""
    with suppress(FileNotFoundError):
        return sorted(filter(is_group_id, os.listdir(parent)))
    return []


def overview(parents: Sequence[Path], newest: int) -> list[dict[str, Any]]:
    """Return the newest groups of each folder, and all active ones.

    `changed_at` (unix seconds) is when a job was added or a decision made; it says nothing about
    the progress of its jobs.
    """
    found = []
    for parent in parents:
        folders = [GroupFolder(parent, group_id) for group_id in group_ids(parent)]
        older = folders[: max(0, len(folders) - newest)]
        for folder in [*filter(lambda one: one.is_active, older), *folders[len(older) :]]:
            with suppress(Conflict, NotFound, FileNotFoundError):  # damaged, or removed just now
                found.append(folder.overview())
    return sorted(found, key=lambda line: str(line["id"]))


def active(parent: Path) -> list[str]:
    """Return the ids of the groups that the process of groups has something to do for."""
    return [one for one in group_ids(parent) if GroupFolder(parent, one).is_active]


def finish_removals(parent: Path) -> None:
    """Finish interrupted removals."""
    with suppress(FileNotFoundError):
        for name in os.listdir(parent):
            if name.startswith(_REMOVED):
                shutil.rmtree(parent / name, ignore_errors=True)
