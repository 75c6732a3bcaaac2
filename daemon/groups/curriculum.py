"""A curriculum on disk, in HOME/curricula/ID: its stages, and how far it is.

plan.json      stages and gate, checked
state.json     attempts with their jobs, comparisons and decisions
events.jsonl   the decisions, for followers
init/          the weights that the first stage starts from, if they come from another job
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .folder import CURRICULUM, SCHEMA, GroupFolder

FINISHED, FAILED = "finished", "failed"  # phases, in addition to those of all groups
CONTINUE, ROLL_BACK, GIVE_UP = "continue", "roll back", "give up"  # decisions


@dataclass(frozen=True)
class Stage:
    """One stage, checked."""

    name: str
    document: dict[str, Any]  # spec.json of its jobs, with the model of the first stage
    has_gate: bool


@dataclass(frozen=True, kw_only=True)
class Curriculum:
    """The request: the content of plan.json."""

    id: str
    kind: str
    created: float  # unix seconds
    name: str | None
    tags: list[str]
    stages: list[Stage]
    gate: dict[str, Any] | None  # spec.json of its evaluations, with the first stage's model
    questions: int  # of the first comparison at a gate
    most_questions: int
    queueing: dict[str, Any]  # front, retries, timeout_s, needs
    origin: str = "cli"  # who submitted it, as in spec.json
    # The error of a gate, over all its comparisons; None: 5 % at each one, as a curriculum of an
    # earlier version began.
    gate_level: float | None = None
    schema: int = SCHEMA


@dataclass(frozen=True)
class Round:
    """A comparison: evaluations of the weights before and after an attempt."""

    questions: int
    before: str  # ids of eval jobs
    after: str


@dataclass(frozen=True)
class Attempt:
    """One training of a stage."""

    stage: int
    number: int  # of rollbacks of this stage before it; each halves the learning rate
    job: str
    rounds: list[Round] = field(default_factory=list)
    decision: str | None = None
    # Of the last round: difference, low, high, p, …; `level`: at which it is decided.
    comparison: dict[str, Any] | None = None


@dataclass(frozen=True)
class State:
    """How far a curriculum is: the content of state.json."""

    phase: str  # RUNNING, PAUSED, CANCELED, FINISHED or FAILED
    attempts: list[Attempt]
    problem: str | None = None  # why it failed

    @property
    def jobs(self) -> list[str]:
        """The ids of all its jobs, in order."""
        found: dict[str, None] = {}
        for attempt in self.attempts:
            found |= dict.fromkeys([attempt.job])
            for one in attempt.rounds:
                found |= dict.fromkeys([one.before, one.after])
        return list(found)

    def begin_of(self, stage: int) -> str | None:
        """Return the job whose weights a stage starts from; None: those of the curriculum."""
        kept = [a.job for a in self.attempts if a.stage < stage and a.decision == CONTINUE]
        return kept[-1] if kept else None


class CurriculumFolder(GroupFolder[Curriculum, State]):
    """One curriculum on disk."""

    kind, plan_type, state_type = CURRICULUM, Curriculum, State

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    def documents(self, plan: Curriculum) -> Iterator[tuple[str, dict[str, Any]]]:
        for stage in plan.stages:
            yield plan.kind, stage.document
        if plan.gate is not None:
            yield "eval", plan.gate
