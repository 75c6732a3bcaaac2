"""Scores completions by the rewards of a job, in this process or in the reward process.

With several ranks, each scores a part of the groups. Imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..context import ONE_PROCESS, Context, Ranks
from ..errors import JobFailed
from ..rewards.prompts import Prompt
from ..rewards.reward_calls import RewardCalls
from ..training.determinism import kept_settings
from .reward_process import RewardFailed, RewardProcess
from .sampler import run_of

MOST_FAILURES = 10  # consecutive groups whose rewards fail, after which the job fails


class Judged(NamedTuple):
    """scores: (B, R) float32 on the CPU, NaN for None. metrics: what the rewards have logged."""

    scores: Tensor
    metrics: dict[str, list[float]]


class _Outcome(NamedTuple):
    """What the rewards return for some completions (see Scored), or why they have failed."""

    scores: list[list[float | None]]
    metrics: dict[str, list[float]]
    extra: list[str]
    failure: str | None


class Judge:
    """Scores completions by rewards, which this process calls, or the reward process.

    `failures` is its state: the number of consecutive groups whose rewards have failed.
    """

    def __init__(self, ctx: Context, calls: RewardCalls | RewardProcess, num_rewards: int) -> None:
        self.failures = 0
        self._ctx = ctx
        self._calls = calls
        self._num_rewards = num_rewards
        self._has_warned = False
        self._has_warned_of_none = False

    @property
    def can_fail(self) -> bool:
        """Whether a group is left out if its rewards fail; otherwise the job fails."""
        return isinstance(self._calls, RewardProcess)

    def scores(
        self,
        rows: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        *,
        size: int,
        step: int,
        state: Mapping[str, Any],
        ranks: Ranks = ONE_PROCESS,
    ) -> Judged:
        """Score completions of `rows`, their prompts; each rank gets the scores of all.

        `size`: completions that have a time limit together, and are left out together when their
        rewards fail. `step`: of events. `state`: the fields of TRL's trainer_state. Raises
        JobFailed.
        """
        starts = range(0, len(rows), size)
        parts = [slice(start, start + size) for start in starts[run_of(len(starts), ranks)]]
        if parts and not self.can_fail:
            parts = [slice(parts[0].start, parts[-1].stop)]
        found = []
        for part in parts:
            one = self._called(rows[part], completions[part], completion_ids[part], state)
            if ranks.size == 1:
                self._count(one, rows[part.start], step)
            found.append(one)
        if ranks.size > 1:
            found = [_Outcome(*one) for of_rank in ranks.gather(found) for one in of_rank]
            for number, one in enumerate(found):
                self._count(one, rows[number * size], step)
        judged = self._judged(found)
        if all(one.failure is None for one in found):
            self._warn_of_none(judged.scores, rows, step)
        return judged

    def _called(
        self,
        rows: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        state: Mapping[str, Any],
    ) -> _Outcome:
        try:
            with kept_settings():
                found = self._calls.score(rows, completions, completion_ids, state)
        except RewardFailed as error:
            return _Outcome([[None] * self._num_rewards] * len(rows), {}, [], str(error))
        return _Outcome(found.scores, found.metrics, found.extra, None)

    def _judged(self, found: Sequence[_Outcome]) -> Judged:
        metrics: dict[str, list[float]] = {}
        for one in found:
            for name, values in one.metrics.items():
                metrics.setdefault(name, []).extend(values)
            self._warn_of_extra(one.extra)
        scores = [
            [math.nan if score is None else score for score in row]
            for one in found
            for row in one.scores
        ]
        return Judged(torch.tensor(scores, dtype=torch.float32), metrics)

    def _count(self, outcome: _Outcome, prompt: Prompt, step: int) -> None:
        """Count and report a failure of rewards. Raises JobFailed after too many in a row."""
        failure = outcome.failure
        if failure is None:
            self.failures = 0
            return
        self.failures += 1
        self._ctx.emit("reward_failed", step=step, row=prompt.row, message=failure)
        # Rank 0 decides: it alone evaluates, so that the other ranks count less.
        if self.failures == MOST_FAILURES and self._ctx.ranks.rank == 0:
            raise JobFailed(
                f"reward: must succeed for one of {MOST_FAILURES} consecutive groups, got none; "
                f"the last one: {failure}"
            )

    def _warn_of_none(self, scores: Tensor, rows: Sequence[Prompt], step: int) -> None:
        """Warn once of completions that no reward scores."""
        is_none = scores.isnan().all(1)
        if self._has_warned_of_none or not is_none.any():
            return
        self._has_warned_of_none = True
        first = rows[int(is_none.nonzero()[0])]
        self._ctx.emit(
            "warning",
            step=step,
            message=f"reward: {int(is_none.sum())} of {len(is_none)} completions have no score "
            f"from any reward and are left out, the first one of row {first.row}",
        )

    def _warn_of_extra(self, columns: Sequence[str]) -> None:
        if columns and not self._has_warned:
            self._has_warned = True
            self._ctx.emit(
                "warning",
                message=f"reward: the column {columns[0]} of log_extra is not recorded; log_metric "
                "is, by the trackers of report_to",
            )
