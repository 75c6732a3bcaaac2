"""All evaluations of a data set, which is identified by its content, not its path."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...jobs.data.sources import files_of, located
from ...jobs.errors import Conflict, NotFound, SpecError
from ...jobs.eval import journal
from ...jobs.eval.options import EvalSpec
from ...jobs.eval.questions import digests
from ...jobs.eval.summary import LOWER_IS_BETTER, pair
from ...jobs.intervals import Comparison
from ...jobs.rewards.problems import ARITHMETIC
from ..client.client import Client
from ..runs.rundir import job_ids


@dataclass(frozen=True)
class Entry:
    """An evaluation in a leaderboard."""

    rank: int  # among those of the same task on the same questions
    job: str
    model: str
    task: str
    metric: str  # the primary one
    value: float
    low: float | None  # None: unknown (a single question)
    high: float | None
    n: int
    unscored: int  # completions without a score, which are left out; 0: also if not known
    completions: int  # in all, scored or not; 0: not known
    weights: str | None  # digest
    # With the first of its rank; None: it is the first, or they share no scored question.
    against_best: Comparison | None


def leaderboard(client: Client, dataset: str) -> list[Entry]:
    """Return all evaluations of a data set, best first, grouped by task and questions.

    Raises SpecError if it is not a data set.
    """
    if dataset != ARITHMETIC:
        dataset = located("dataset", dataset, Path.cwd())
        files_of("dataset", dataset)
    groups: defaultdict[tuple[str, str, str], list[tuple[str, dict[str, Any]]]]
    groups = defaultdict(list)
    known: dict[EvalSpec, list[str]] = {}  # digests of the first questions, by how they are read
    for job_id, spec, result in _evaluations(client):
        if _is_of(dataset, spec, result, known):
            metric = next(iter(result["metrics"]))
            groups[spec.task, metric, result["data"]["digest"]].append((job_id, result))
    largest_first = sorted(groups.items(), key=lambda item: -item[1][0][1]["questions"])
    return [
        entry
        for (task, metric, _), found in largest_first
        for entry in _ranked(client.home.runs, task, metric, found)
    ]


def _evaluations(client: Client) -> Iterator[tuple[str, EvalSpec, dict[str, Any]]]:
    """Yield the evaluations that have a result."""
    for job_id in sorted(job_ids(client.home.runs)):  # of equal ones the older first
        if not job_id.startswith(f"{EvalSpec.kind}-"):
            continue
        with suppress(Conflict, NotFound, SpecError):  # damaged, or of a later version
            rundir = client.rundir(job_id)
            result = rundir.read_result()
            if result is not None:
                yield job_id, EvalSpec.parse(rundir.read_spec()["spec"]), result


def _ranked(
    runs: Path, task: str, metric: str, found: Sequence[tuple[str, Mapping[str, Any]]]
) -> Iterator[Entry]:
    sign = 1 if metric in LOWER_IS_BETTER else -1
    ordered = sorted(found, key=lambda item: sign * item[1]["metrics"][metric]["value"])
    best = _rows(runs, ordered[0][0])
    for rank, (job_id, result) in enumerate(ordered, start=1):
        one = result["metrics"][metric]
        pairing = None if rank == 1 else pair(best, _rows(runs, job_id))
        yield Entry(
            rank=rank,
            job=job_id,
            model=result["model"],
            task=task,
            metric=metric,
            value=one["value"],
            low=one["low"],
            high=one["high"],
            n=one["n"],
            unscored=one.get("unscored", 0),  # not in results of earlier versions
            completions=one.get("completions", 0),
            weights=(result.get("weights") or {}).get("digest"),
            against_best=None if pairing is None else pairing.comparisons.get(metric),
        )


def _rows(runs: Path, job_id: str) -> list[dict[str, Any]]:
    with suppress(OSError):
        return journal.read(runs / job_id / journal.ROWS)
    return []


def _is_of(
    dataset: str, spec: EvalSpec, result: Mapping[str, Any], known: dict[EvalSpec, list[str]]
) -> bool:
    """Whether the questions of an evaluation are the first ones of a data set."""
    whole = spec.of_data(dataset)
    if whole not in known:
        try:
            known[whole] = list(digests(whole.raw_questions()))
        except SpecError:
            known[whole] = []  # not a data set of this task
    place: int = result["questions"] - 1
    return place < len(known[whole]) and known[whole][place] == result["data"]["digest"]
