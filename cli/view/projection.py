"""Projects how long a training takes, from the events of a short one with the same options."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...jobs.errors import JobFailed

STEPS = (100, 500, 1_000, 3_500, 6_500, 10_000)  # rows of a projection


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """The measured durations of a training, in seconds."""

    step_s: float  # the median of `num_steps`
    num_steps: int
    startup_s: float  # from the begin of the execution to that of its first step
    eval_s: float | None  # one evaluation; None if none was made
    eval_every: int  # steps; 0: never

    def seconds(self, start: int, end: int) -> float:
        """How long the steps after `start` take until `end`, with the evaluations that are due."""
        seconds = self.step_s * (end - start)
        if self.eval_s is not None and self.eval_every:
            seconds += self.eval_s * (end // self.eval_every - start // self.eval_every)
        return seconds


def step_times(events: Iterable[Mapping[str, Any]], *, warm_up: int, eval_every: int) -> StepTimes:
    """Measure the steps after the first `warm_up` of a training's one execution.

    By the times between their events: what lies between two steps counts. Raises JobFailed where
    there are none.
    """
    events = list(events)
    ends = {event["step"]: event["time"] for event in events if event["type"] == "step"}
    spans = [
        ends[after] - ends[before]
        for before, after in itertools.pairwise(sorted(ends))
        if before >= warm_up and after == before + 1
    ]
    if not spans:
        raise JobFailed(f"the job ended after {len(ends)} steps: there is nothing to measure")
    began = {event["type"]: event["time"] for event in events if event["type"] in _BEGINS}
    evals = [event["seconds"] for event in events if event["type"] == "eval" and "seconds" in event]
    return StepTimes(
        step_s=statistics.median(spans),
        num_steps=len(spans),
        startup_s=began["begin"] - began["started"] if len(began) == len(_BEGINS) else 0.0,
        eval_s=statistics.median(evals) if evals else None,
        eval_every=eval_every,
    )


_BEGINS = ("started", "begin")


def projection(
    times: StepTimes, *, now: float, checkpoint: int | None, steps_total: int | None
) -> list[dict[str, Any]]:
    """Return a row for each of `STEPS`, and for the job's own number of steps, if it has one.

    A row has `steps`, `hours` and `ends_at` (unix seconds, when begun now); with a checkpoint also
    `hours_left` and `resumed_ends_at` from there, None if it is at least as far.
    """
    rows = []
    for steps in sorted({*STEPS} if steps_total is None else {*STEPS, steps_total}):
        seconds = times.startup_s + times.seconds(0, steps)
        row: dict[str, Any] = {"steps": steps, "hours": seconds / 3600, "ends_at": now + seconds}
        if checkpoint is not None:
            left = (
                times.startup_s + times.seconds(checkpoint, steps) if steps > checkpoint else None
            )
            row["hours_left"] = None if left is None else left / 3600
            row["resumed_ends_at"] = None if left is None else now + left
        rows.append(row)
    return rows


def headers(checkpoint: int | None) -> Sequence[str]:
    """The titles of a projection's columns."""
    from_zero = (">STEPS", ">FROM ZERO", ">DONE AT")
    return from_zero if checkpoint is None else (*from_zero, f">FROM {checkpoint}", ">DONE AT")
