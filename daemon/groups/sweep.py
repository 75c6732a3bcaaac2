"""A sweep on disk, in HOME/sweeps/ID: the request and its progress.

plan.json     the request
state.json    points, members, decisions and scores
optuna.log    the trials of a search, for Optuna's own tools (see study.py)
init/         the weights that its members start from, if they come from another job

Ids of members are chosen before they are submitted, so a submission that was interrupted can be
finished without submitting a job twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...jobs.training.options import MOST_STEPS
from .folder import SCHEMA, SWEEP, GroupFolder
from .ranges import Range


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
    rungs: list[int]  # steps at which points are compared; the last one is the end. With a time
    # limit none: the steps are not known.
    document: dict[str, Any]  # spec.json of its jobs, without the options that differ
    queueing: dict[str, Any]  # front, after, at, retries, timeout_s, needs
    search: Search | None = None  # None: all combinations of the axes
    schema: int = SCHEMA

    @property
    def steps(self) -> int:
        """The steps of a job that is trained to its end; at least these, with a time limit."""
        return self.rungs[-1] if self.rungs else MOST_STEPS


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
    # Of trials, by point: see search.py. None: a mean beyond float64.
    scores: dict[str, float | None] = field(default_factory=dict)
    submitted: int = 0  # members that had been queued when `is_submitted` was last true

    @property
    def jobs(self) -> list[str]:
        """The ids of all its jobs, in order."""
        return [member.id for member in self.members]

    @property
    def kept(self) -> list[int]:
        """The points that still take part."""
        return self.decisions[-1].kept if self.decisions else list(range(len(self.points)))

    def members_of(self, points: list[int]) -> list[Member]:
        """Return the members of some points."""
        return [member for member in self.members if member.point in points]


class SweepFolder(GroupFolder[Sweep, State]):
    """One sweep on disk."""

    kind, plan_type, state_type = SWEEP, Sweep, State

    def documents(self, plan: Sweep) -> Iterator[tuple[str, dict[str, Any]]]:
        yield plan.kind, plan.document
