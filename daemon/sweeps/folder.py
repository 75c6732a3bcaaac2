"""A sweep on disk, in HOME/sweeps/ID: the request and its progress.

plan.json     the request
state.json    points, members, decisions and scores
optuna.log    the trials of a search, for Optuna's own tools (see study.py)
init/         the weights that its members start from, if they come from another job

Ids of members are chosen before they are submitted, so a submission that was interrupted can be
finished without submitting a job twice.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...jobs.errors import Conflict, NotFound
from ...jobs.ids import is_job_id, kind_of
from ..host.home import Home
from . import group
from .group import CANCELED as CANCELED, PAUSED as PAUSED, RUNNING as RUNNING, GroupFolder
from .ranges import Range

KIND = "sweep"  # begins the ids
SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Search:
    """How the points of a sweep are chosen one after another."""

    sampler: str  # "optuna"
    trials: int  # points in all
    parallel: int  # points whose jobs wait or run at the same time
    ranges: dict[str, Range]  # besides the axes


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The request: the content of plan.json."""

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
    document: dict[str, Any]  # spec.json of its jobs, without the options that differ
    queueing: dict[str, Any]  # front, after, at, retries, timeout_s, needs
    search: Search | None = None  # None: all combinations of the axes
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
    scores: dict[str, float] = field(default_factory=dict)  # of trials, by point: see search.py
    submitted: int = 0  # members that had been queued when `is_submitted` was last true

    @property
    def kept(self) -> list[int]:
        """The points that still take part."""
        return self.decisions[-1].kept if self.decisions else list(range(len(self.points)))

    def members_of(self, points: list[int]) -> list[Member]:
        """Return the members of some points."""
        return [member for member in self.members if member.point in points]


class SweepFolder(GroupFolder):
    """One sweep on disk."""

    def __init__(self, home: Home, sweep_id: str) -> None:
        super().__init__(home.sweeps, sweep_id)
        self.home = home

    @classmethod
    def open(cls, home: Home, sweep_id: str) -> SweepFolder:
        """Return the folder of a sweep. Raises NotFound, also for an invalid id."""
        if not is_sweep_id(sweep_id) or not (home.sweeps / sweep_id).is_dir():
            raise NotFound(f"sweep: no sweep {sweep_id[:80]!r} in {home.sweeps}")
        return cls(home, sweep_id)

    @staticmethod
    def creating(home: Home, sweep: Sweep, state: State) -> AbstractContextManager[Path]:
        """Yield a temporary folder for further files; it becomes the sweep's at the end."""
        return group.creating(home.sweeps, sweep.id, asdict(sweep), asdict(state))

    def read(self) -> Sweep:
        """Return the plan. Raises Conflict if it cannot be read."""
        document = self.read_plan()
        if document.get("schema") != SCHEMA:
            raise Conflict(f"{self.path}: written by another version of warmd")
        with self.reading():
            group.update_options(document["kind"], document["document"])
            if (search := document.get("search")) is not None:
                ranges = {name: Range(**one) for name, one in search["ranges"].items()}
                document["search"] = Search(**{**search, "ranges": ranges})
            return Sweep(**document)

    def state(self) -> State:
        """Return the state. Raises Conflict if it cannot be read."""
        document = self.read_state()
        with self.reading():
            document["members"] = [Member(**member) for member in document["members"]]
            document["decisions"] = [Decision(**one) for one in document["decisions"]]
            if not all(is_job_id(member.id) for member in document["members"]):
                raise ValueError("a member's id is not a job id")
            return State(**document)

    def update(self, **parts: Any) -> State:
        """Replace parts of the state and return it; within `changing`."""
        state = replace(self.state(), **parts)
        self.write_state(asdict(state))
        return state


def is_sweep_id(text: str) -> bool:
    """Whether the text is a valid sweep id, which is safe in paths."""
    return group.is_group_id(text) and kind_of(text) == KIND


def sweep_ids(home: Home) -> list[str]:
    """Return the ids of all sweeps, oldest first."""
    return group.group_ids(home.sweeps)
