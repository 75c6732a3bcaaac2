"""The folder of a sweep, HOME/sweeps/ID: what was requested, and how far it is.

sweep.json    the plan; never changes
state.json    points, members and decisions; replaced as a whole
init/         the weights that its members start from, if they come from another job
active        exists while the sweep's process has something to do

A folder is complete when it appears under its name, and its lock is held for every change.
Ids of members are chosen before they are submitted, so a submission that was interrupted can be
finished without submitting a job twice.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from ...jobs.errors import Conflict, NotFound
from ...jobs.files.atomic import fsync, locked, write_atomic
from ..host.home import Home
from ..runs.rundir import is_job_id

KIND = "sweep"  # begins the ids
SCHEMA = 1

RUNNING, PAUSED, CANCELED = "running", "paused", "canceled"

_ID = re.compile(rf"{KIND}-\d{{8}}-\d{{6}}-[a-z0-9]{{4}}")
_STAGING = ".new-"
_REMOVED = ".removed-"


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What was requested: the content of sweep.json."""

    id: str
    kind: str  # of its jobs
    created: float  # unix seconds
    origin: str  # one of rundir.ORIGINS
    name: str | None
    tags: list[str]
    axes: dict[str, list[Any]]
    seeds: int  # members per point
    halving: int | None
    metric: str
    lower_is_better: bool
    rungs: list[int]  # steps at which points are compared; the last one is the end
    document: dict[str, Any]  # spec.json of its jobs, but for what differs
    queueing: dict[str, Any]  # front, after, at, retries, timeout_s
    schema: int = SCHEMA

    @property
    def steps(self) -> int:
        """The steps of a job that is trained to its end."""
        return self.rungs[-1]


@dataclass(frozen=True)
class Member:
    """One job of a sweep."""

    id: str
    point: int  # index of its point
    changes: dict[str, Any]  # its options that are not those of the sweep's document


@dataclass(frozen=True)
class Decision:
    """Which points were kept at a rung."""

    step: int
    scores: dict[str, float | None]  # mean of each point that was compared, by its index
    kept: list[int]
    time: float


@dataclass(frozen=True)
class State:
    """How far a sweep is: the content of state.json."""

    phase: str  # RUNNING, PAUSED or CANCELED
    is_submitted: bool  # whether all members have been queued
    points: list[dict[str, Any]]
    members: list[Member]
    decisions: list[Decision]

    @property
    def kept(self) -> list[int]:
        """The points that still take part."""
        return self.decisions[-1].kept if self.decisions else list(range(len(self.points)))

    def members_of(self, points: list[int]) -> list[Member]:
        """Return the members of some points."""
        return [member for member in self.members if member.point in points]


class SweepFolder:
    """One sweep on disk."""

    def __init__(self, home: Home, sweep_id: str) -> None:
        self.id = sweep_id
        self.path = home.sweeps / sweep_id

    @classmethod
    def open(cls, home: Home, sweep_id: str) -> SweepFolder:
        """Return the folder of a sweep. Raises NotFound, also for an invalid id."""
        if not is_sweep_id(sweep_id) or not (home.sweeps / sweep_id / "sweep.json").is_file():
            raise NotFound(f"sweep: no sweep {sweep_id[:80]!r} in {home.sweeps}")
        return cls(home, sweep_id)

    @classmethod
    @contextmanager
    def creating(cls, home: Home, sweep: Sweep, state: State) -> Iterator[Path]:
        """Yield a folder for further files; it becomes that of the sweep at the block's end."""
        home.sweeps.mkdir(mode=0o700, exist_ok=True)
        staging = home.sweeps / f"{_STAGING}{sweep.id}"
        try:
            staging.mkdir(mode=0o700)
            (staging / "active").touch()
            write_atomic(staging / "sweep.json", _dumps(sweep))
            write_atomic(staging / "state.json", _dumps(state))
            yield staging
            staging.rename(home.sweeps / sweep.id)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        fsync(home.sweeps)

    @property
    def init(self) -> Path:
        """The weights that the members start from, if they come from another job."""
        return self.path / "init"

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Keep out other processes that change this sweep."""
        with locked(self.path):
            yield

    def read(self) -> Sweep:
        """Return the plan. Raises Conflict if it cannot be read."""
        document = self._load("sweep.json")
        if document.get("schema") != SCHEMA:
            raise Conflict(f"{self.path}: written by another version of warmd")
        with _reading(self.path):
            return Sweep(**document)

    def state(self) -> State:
        """Return how far it is. Raises Conflict if it cannot be read."""
        document = self._load("state.json")
        with _reading(self.path):
            document["members"] = [Member(**member) for member in document["members"]]
            document["decisions"] = [Decision(**one) for one in document["decisions"]]
            if not all(is_job_id(member.id) for member in document["members"]):
                raise ValueError("a member's id is no job id")
            return State(**document)

    def update(self, **parts: Any) -> State:
        """Replace parts of the state and return it; within `changing`."""
        state = replace(self.state(), **parts)
        write_atomic(self.path / "state.json", _dumps(state))
        return state

    @property
    def is_active(self) -> bool:
        """Whether the sweep's process has something to do."""
        return (self.path / "active").exists()

    def set_active(self, is_active: bool) -> None:
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

    def _load(self, name: str) -> dict[str, Any]:
        try:
            document = orjson.loads((self.path / name).read_bytes())
        except FileNotFoundError:
            raise NotFound(f"sweep: no sweep {self.id!r}") from None
        except (OSError, orjson.JSONDecodeError) as error:
            raise Conflict(f"{self.path / name}: cannot be read: {error}") from error
        if not isinstance(document, dict):
            raise Conflict(f"{self.path / name}: must be a JSON object")
        return document


def is_sweep_id(text: str) -> bool:
    """Whether the text is a valid sweep id, which is safe in paths."""
    return _ID.fullmatch(text) is not None


def sweep_ids(home: Home) -> list[str]:
    """Return the ids of all sweeps, oldest first."""
    with suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(home.sweeps) if is_sweep_id(name))
    return []


def active(home: Home) -> list[str]:
    """Return the ids of the sweeps whose process has something to do."""
    return [one for one in sweep_ids(home) if SweepFolder(home, one).is_active]


def finish_removals(home: Home) -> None:
    """Remove what an interrupted removal or creation has left."""
    with suppress(FileNotFoundError):
        for name in os.listdir(home.sweeps):
            if name.startswith(_REMOVED):
                shutil.rmtree(home.sweeps / name, ignore_errors=True)


def _dumps(value: Sweep | State) -> bytes:
    return orjson.dumps(asdict(value), option=orjson.OPT_INDENT_2)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise Conflict(f"{path}: cannot be read: {error}") from error
