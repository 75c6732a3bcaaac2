"""Digest of a time span: ended jobs with their results, interruptions, and running jobs."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ...configs.queues import TRAIN
from ...jobs import KINDS, spec_class
from ...jobs.errors import Conflict, NotFound
from ...jobs.ids import by_time, kind_of
from ..client.client import Client
from ..groups.actions import jobs_of
from ..groups.folder import CURRICULUM, SWEEP, group_ids
from ..lifecycle.statuses import PENDING, shown
from ..lifecycle.view import JobFilter
from ..runs import events
from ..runs.rundir import RunDir, job_ids

_ENDS = (*events.TERMINAL, "paused")  # events after which a later start was intended


@dataclass(frozen=True)
class Evaluation:
    """The latest evaluation of a job on held-out data."""

    metric: str
    before: float | None  # by the first evaluation, at step 0
    value: float
    low: float | None  # 95 % interval; None: the job has recorded none
    high: float | None
    n: int | None
    unscored: int  # completions without a score, which are left out
    completions: int  # in all, scored or not; 0: none is unscored


@dataclass(frozen=True)
class Line:
    """One training job or evaluation in the digest."""

    id: str
    name: str | None
    model: str | None
    status: str
    step: int
    steps_total: int | None
    error: str | None
    ended_at: float | None
    ends_at: float | None  # expected, of a job that runs
    interruptions: int  # since the start of the span
    lost_s: float  # time they cost: from the last step before each to the next new one
    evaluation: Evaluation | None
    metric: str | None = None  # of the latest step: the reward, else the loss
    value: float | None = None


@dataclass(frozen=True)
class Group:
    """A sweep or a curriculum with a job in the digest."""

    id: str
    name: str | None
    status: str
    problem: str | None
    metric: str | None = None  # the rest of a sweep
    best: Mapping[str, Any] | None = None  # its best point, as `Groups.sweep` has it
    model: str | None = None  # the rest of a curriculum: the latest job that a gate let through
    decisions: Mapping[str, int] | None = None  # how often each was taken


@dataclass(frozen=True)
class Digest:
    """What happened in a home from `since` until `until`."""

    since: float
    until: float
    ended: tuple[Line, ...]  # latest last
    pending: tuple[Line, ...]  # run or wait
    groups: tuple[Group, ...]
    answers: int  # other jobs with an event in the span
    disk_free_bytes: int


def digest(client: Client, *, since: float) -> Digest:
    """Return what happened in this home since a time (unix seconds)."""
    lines, answers = [], 0
    for job_id in sorted(job_ids(client.home.runs), key=by_time):
        if _touched(RunDir(client.home.runs / job_id)) >= since:
            if _is_line(job_id):
                lines.append(job_id)
            else:
                answers += 1
    pending = {job["id"]: job for job in client.jobs.all(JobFilter(statuses=PENDING))}
    ended = []
    for job_id in lines:
        if job_id in pending:
            continue
        with suppress(Conflict, NotFound):  # removed meanwhile, or damaged
            ended.append(_line(client, client.jobs.get(job_id), since))
    return Digest(
        since=since,
        until=client.now(),
        ended=tuple(sorted(ended, key=lambda line: line.ended_at or 0)),
        pending=tuple(_line(client, job, since) for job in pending.values() if _is_line(job["id"])),
        groups=tuple(_groups(client, {*lines, *pending})),
        answers=answers,
        disk_free_bytes=shutil.disk_usage(client.home.runs).free,
    )


def _groups(client: Client, ids: Set[str]) -> Iterator[Group]:
    """Yield the sweeps and curricula of these jobs."""
    for sweep_id in group_ids(client.home, SWEEP):
        with suppress(Conflict, NotFound):
            if not ids.isdisjoint(jobs_of(client.home, sweep_id)):
                found = client.groups.sweep(sweep_id)
                best = None if found["best"] is None else found["points"][found["best"]]
                yield Group(
                    sweep_id,
                    found["name"],
                    found["status"],
                    found["error"],
                    metric=found["metric"],
                    best=best,
                )
    for curriculum_id in group_ids(client.home, CURRICULUM):
        with suppress(Conflict, NotFound):
            if not ids.isdisjoint(jobs_of(client.home, curriculum_id)):
                found = client.groups.curriculum(curriculum_id)
                decided = [one["decision"] for one in found["attempts"] if one["decision"]]
                yield Group(
                    curriculum_id,
                    found["name"],
                    found["status"],
                    found["problem"],
                    model=found["model"],
                    decisions=Counter(decided),
                )


def _line(client: Client, job: Mapping[str, Any], since: float) -> Line:
    found = list(events.read(RunDir(client.home.runs / job["id"]).events))
    interruptions, lost_s = lost_time(found, since)
    metric, value = _trained(found)
    eta_s = job["eta_s"]
    return Line(
        id=job["id"],
        name=job["name"],
        model=job["model"],
        status=shown(job),
        step=job["step"],
        steps_total=job["steps_total"],
        error=job["error"],
        ended_at=job["ended_at"],
        ends_at=None if eta_s is None else client.now() + eta_s,
        interruptions=interruptions,
        lost_s=round(lost_s, 3),
        evaluation=evaluation_of(found),
        metric=metric,
        value=value,
    )


def _trained(found: Iterable[Mapping[str, Any]]) -> tuple[str | None, float | None]:
    """Return the name and the value of the main metric of a job's latest step, if it has one."""
    latest: Mapping[str, Any] = {}
    for event in found:
        if event["type"] == "step":
            latest = event
    name = next((name for name in _TRAINED_BY if _is_number(latest.get(name))), None)
    return name, None if name is None else float(latest[name])


def lost_time(found: Iterable[Mapping[str, Any]], since: float) -> tuple[int, float]:
    """Return how often a job was interrupted since then, and the seconds that this cost.

    An interruption is an event `started` whose previous execution had not ended: it was killed. It
    costs the time from the last event before it to the first new step after it: the restart, and
    the steps that were computed again.
    """
    count, lost_s = 0, 0.0
    last: Mapping[str, Any] | None = None  # event before the interruption
    before: Mapping[str, Any] | None = None
    for event in found:
        if event["type"] == "started" and event["time"] >= since:
            is_wanted = before is None or before["type"] in _ENDS
            if not is_wanted:
                count += 1
                last = last or before
        elif event["type"] in ("step", *_ENDS) and last is not None:
            lost_s += max(event["time"] - last["time"], 0.0)
            last = None
        if event["type"] != "requeued":  # written by the worker, after the interruption
            before = event
    return count, lost_s


def evaluation_of(found: Iterable[Mapping[str, Any]]) -> Evaluation | None:
    """Return the latest evaluation, by its first metric: the reward, accuracy or loss."""
    evaluations = [event for event in found if event["type"] == "eval"]
    if not evaluations:
        return None
    latest = evaluations[-1]
    metric = next((name for name in _METRICS if _is_number(latest.get(name))), None)
    if metric is None:
        return None
    value, count = float(latest[metric]), latest.get("n")
    n = count if isinstance(count, int) and count > 0 else None
    first = evaluations[0]
    before = first.get(metric) if first.get("phase") == "before" else None
    # A mean alone does not give its interval: one between 0 and 1 need not be of 0s and 1s.
    low, high = (latest.get("intervals") or {}).get(metric) or (None, None)
    left_out = (latest.get(name, 0) for name in ("unscored", "completions"))
    return Evaluation(metric, before, value, low, high, n, *left_out)


_TRAINED_BY = ("reward", "loss")
_METRICS = ("reward", "accuracy", "strict", "loss", "mlm_loss", "bits_per_byte")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_line(job_id: str) -> bool:
    """Whether a job is a training or an evaluation."""
    kind = kind_of(job_id)
    return kind in KINDS and (spec_class(kind).queue == TRAIN or spec_class(kind).is_kept)


def _touched(rundir: RunDir) -> float:
    """The time of a job's latest event, or else of its creation; 0 if it is gone."""
    for path in (rundir.events, rundir.path):
        with suppress(OSError):
            return path.stat().st_mtime
    return 0.0
