"""The folder of a group of jobs: a plan that never changes, a state that is replaced as a whole.

A folder is complete when it appears under its name, and its lock is held for every change. It has a
file `active` while the process of groups has something to do.
"""

from __future__ import annotations

import os
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import orjson

from ...jobs import stored_options
from ...jobs.errors import Conflict, NotFound
from ...jobs.files import records
from ...jobs.files.atomic import fsync, locked, write_atomic
from ...jobs.ids import is_job_id, kind_of
from ..host.home import Home
from ..runs.rundir import STAGING, remove_stale_staging
from ..runs.seal import DAMAGED, is_whole, sealed

RUNNING, PAUSED, CANCELED = "running", "paused", "canceled"  # phases of all groups

SWEEP, CURRICULUM = KINDS = ("sweep", "curriculum")  # begin the ids
SCHEMA = 1  # of plan.json

_ID = re.compile(rf"({'|'.join(KINDS)})-\d{{8}}-\d{{6}}-[a-z0-9]{{4}}")
_REMOVED = ".removed-"
_PLAN, _STATE = "plan.json", "state.json"


PlanT = TypeVar("PlanT")
StateT = TypeVar("StateT", bound="_State")


class _State(Protocol):
    @property
    def jobs(self) -> list[str]: ...


class Folder:
    """A group of any kind on disk."""

    def __init__(self, home: Home, group_id: str) -> None:
        self.id = group_id
        self.path = _parent(home, kind_of(group_id)) / group_id

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

    def remove(self) -> None:
        """Remove the folder, but none of its jobs."""
        removed = self.path.with_name(f"{_REMOVED}{self.id}")
        with suppress(FileNotFoundError):
            self.path.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)

    def overview(self) -> dict[str, Any]:
        """Return the row of the group in a list of groups. Raises NotFound and Conflict."""
        plan, is_active = self.read_plan(), self.is_active
        with self._reading():
            return {
                "id": self.id,
                "kind": str(plan["kind"]),
                "name": plan["name"],
                "active": is_active,
                "phase": str(self._load(_STATE)["phase"]),
                "changed_at": (self.path / _STATE).stat().st_mtime,
            }

    def read_plan(self) -> dict[str, Any]:
        """Return the content of plan.json. Raises NotFound and Conflict."""
        return self._load(_PLAN)

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
    def _reading(self) -> Iterator[None]:
        """Turn errors about missing or wrong parts of a file into Conflict."""
        try:
            yield
        except (KeyError, TypeError, ValueError) as error:
            raise Conflict(f"{self.path}: cannot be read: {error}") from error


class GroupFolder(Folder, ABC, Generic[PlanT, StateT]):
    """A group on disk with its plan and its state, which a class for each kind reads."""

    kind: ClassVar[str]
    plan_type: type[PlanT]  # of the content of plan.json
    state_type: type[StateT]  # of the content of state.json

    @classmethod
    def open(cls, home: Home, group_id: str) -> Self:
        """Return the folder of a group of this kind. Raises NotFound, also for an invalid id."""
        if is_group_id(group_id) and kind_of(group_id) == cls.kind:
            folder = cls(home, group_id)
            if folder.path.is_dir():
                return folder
        raise NotFound(f"{cls.kind}: no {cls.kind} {group_id[:80]!r} in {_parent(home, cls.kind)}")

    @classmethod
    @contextmanager
    def creating(cls, home: Home, plan: Any, state: Any) -> Iterator[Path]:
        """Yield a temporary folder for further files; it becomes the group's at the end."""
        parent = _parent(home, cls.kind)
        parent.mkdir(mode=0o700, exist_ok=True)
        staging = parent / f"{STAGING}{plan.id}"
        try:
            staging.mkdir(mode=0o700)
            (staging / "active").touch()
            write_atomic(staging / _PLAN, sealed(plan))
            write_atomic(staging / _STATE, sealed(state))
            yield staging
            staging.rename(parent / plan.id)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        fsync(parent)

    @abstractmethod
    def documents(self, plan: PlanT) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the kinds and spec.json of the jobs that this version will queue."""

    def read(self) -> PlanT:
        """Return the plan. Raises NotFound, and Conflict if it cannot be read."""
        document = self.read_plan()
        if document.get("schema") != SCHEMA:
            raise Conflict(f"{self.path}: written by another version of warmd")
        with self._reading():
            plan = records.convert(document, self.plan_type)
            for kind, spec_json in self.documents(plan):
                # An earlier version, which wrote the plan, lacks options: they get its defaults.
                spec_json["spec"] = stored_options(kind, spec_json["spec"])
            return plan

    def state(self) -> StateT:
        """Return the state. Raises NotFound, and Conflict if it cannot be read."""
        document = self._load(_STATE)
        with self._reading():
            state = records.convert(document, self.state_type)
            if not all(map(is_job_id, state.jobs)):
                raise ValueError("the id of a job is none")
            return state

    def update(self, **parts: Any) -> StateT:
        """Replace parts of the state and return it; within `changing`."""
        state: StateT = replace(self.state(), **parts)  # type: ignore[type-var]
        write_atomic(self.path / _STATE, sealed(state))
        return state

    @property
    def init(self) -> Path:
        """The weights that its jobs start from, if they come from another job."""
        return self.path / "init"


def is_group_id(text: str) -> bool:
    """Whether the text is a valid id of a group, which is safe in paths."""
    return _ID.fullmatch(text) is not None


def is_id_prefix(text: str) -> bool:
    """Whether the text begins the id of a group, and not a name."""
    return text.startswith(KINDS)


def group_ids(home: Home, kind: str) -> list[str]:
    """Return the ids of all groups of a kind, oldest first."""
    with suppress(FileNotFoundError):
        return sorted(filter(is_group_id, os.listdir(_parent(home, kind))))
    return []


def all_folders(home: Home) -> list[Folder]:
    """Return the folders of all groups: by kind, oldest first."""
    return [Folder(home, one) for kind in KINDS for one in group_ids(home, kind)]


def overview(home: Home, newest: int) -> list[dict[str, Any]]:
    """Return the newest groups of each kind, and all active ones.

    `changed_at` (unix seconds) is when a job was added or a decision made; it says nothing about
    the progress of its jobs.
    """
    found = []
    for kind in KINDS:
        folders = [Folder(home, one) for one in group_ids(home, kind)]
        older = folders[: max(0, len(folders) - newest)]
        for folder in [*filter(lambda one: one.is_active, older), *folders[len(older) :]]:
            with suppress(Conflict, NotFound, FileNotFoundError):  # damaged, or removed just now
                found.append(folder.overview())
    return sorted(found, key=lambda line: str(line["id"]))


def active(home: Home) -> list[str]:
    """Return the ids of the groups that the process of groups has something to do for."""
    return [folder.id for folder in all_folders(home) if folder.is_active]


def clean(home: Home) -> None:
    """Remove what killed processes have left of removals and of submissions."""
    for kind in KINDS:
        parent = _parent(home, kind)
        remove_stale_staging(parent)
        for removed in parent.glob(f"{_REMOVED}*"):
            shutil.rmtree(removed, ignore_errors=True)


def _parent(home: Home, kind: str) -> Path:
    return home.sweeps if kind == SWEEP else home.curricula
