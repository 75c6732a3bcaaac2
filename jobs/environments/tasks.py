"""The tasks of a job in an environment: the records of a data set, or seeds. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ..data.reader import Reader, Reading
from ..errors import SpecError
from ..files import jsonl
from ..files.chats import Messages
from ..rewards.problems import Problem, problem_of

SEEDS = "seeds"  # the name of the tasks without a data set
_PROMPTS = frozenset({"prompt", "question", "messages"})


@dataclass(frozen=True)
class Task:
    """What an episode is about. `prompt`: of the row, before what the environment adds."""

    seed: int
    row: dict[str, Any]
    prompt: str | Messages | None = None

    @property
    def name(self) -> str | None:
        """The name of its environment, where there are several."""
        name = self.row.get("environment")
        return name if isinstance(name, str) else None


def load(
    source: str | None,
    *,
    template: str,
    samples: int | None,
    reading: Reading,
    named_by: str = "dataset",
) -> list[Problem]:
    """Return the first `samples` tasks of a data set, None for all; without one, their numbers.

    A record need not have a prompt: the environment opens the episode, and gets all columns.
    Equal records are tasks of their own. `named_by`: the option that names the data set. Raises
    SpecError.
    """
    if source is None:
        return _seeds(samples)
    found = _read(source, samples, template, reading, named_by)
    counted_by = "samples" if named_by == "dataset" else "eval_samples"
    _check_count(counted_by, samples, len(found), f"the tasks of {source}")
    return found


def load_both(
    source: str | None, *, template: str, samples: int | None, held_out: int, reading: Reading
) -> tuple[list[Problem], list[Problem]]:
    """Return the tasks to train on and the held-out ones: the next after the first `samples`.

    If `samples` is None, the last ones are held out. Raises SpecError.
    """
    if source is None:
        found = _seeds(samples)
        return found, [Problem("", None, len(found) + number) for number in range(held_out)]
    most = None if samples is None else samples + held_out
    found = _read(source, most, template, reading, "dataset")
    _check_count("samples", samples, len(found), f"the tasks of {source}")
    trained = max(len(found) - held_out, 1) if samples is None else samples
    rest = f"the tasks of {source} without {trained} for the training"
    _check_count("eval_samples", held_out, len(found) - trained, rest)
    return found[:trained], found[trained:]


def task_of(problem: Problem) -> Task:
    """Return what an episode of a task is about."""
    return Task(problem.row, dict(problem.columns), problem.prompt)


def _seeds(samples: int | None) -> list[Problem]:
    if samples is None:
        raise SpecError("samples", "must be a number with environment and no dataset, got all")
    return [Problem("", None, number) for number in range(samples)]


def _read(
    source: str, most: int | None, template: str, reading: Reading, named_by: str
) -> list[Problem]:
    """Return the first `most` tasks of a data set, None for all. Raises SpecError."""

    def convert(values: Mapping[str, Any], place: jsonl.Place) -> Problem:
        if _PROMPTS.isdisjoint(values):
            return Problem("", None, place.line, dict(values), place)
        problem = problem_of(template, values, place)
        for name in problem.inputs.content:  # a class has its tools, and the model its template
            raise place.field(name).fault("absent with environment", "one")
        return problem

    found = list(islice(Reader(convert, reading).rows(named_by, source), most))
    if not found:
        raise SpecError(named_by, f"must have a task, got {source}: {reading.skipped}")
    return found


def _check_count(option: str, wanted: int | None, found: int, what: str) -> None:
    if wanted is not None and found < wanted:
        raise SpecError(option, f"must be at most {found} ({what}), got {wanted}")
