"""Scores completions with the rewards, in this process or another, and handles their failures.

Rewards run in this process or, with a time limit, in the reward process. With several ranks, each
scores a part of the groups. Imports trl.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import torch

from ..context import Context
from ..errors import JobFailed
from ..rewards.prompts import Prompt
from ..rewards.rewards import Reward
from ..rewards.user_rewards import KeywordReward
from .packed_trainer import PackedTrainer
from .reward_process import RewardFailed, RewardProcess
from .rollout import run_of

MOST_FAILURES = 10  # consecutive groups whose rewards fail, after which the job fails

# Outcome of the rewards of a group: None, or the row of its prompt and the reason of the failure.
Outcome = tuple[int, str] | None


def _plain(value: Any) -> Any:
    """Return a value that a reward has logged, and that JSON lacks: as numbers or as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class ScoredTrainer(PackedTrainer):
    """A PackedTrainer that scores completions with `rewards`, a function by name.

    `reward_process`: runs the rewards; None: this process does.
    """

    job: Context
    state: Any
    _pending_extra_logs: Any
    _pending_metrics: Any

    def __init__(
        self,
        *args: Any,
        rewards: Mapping[str, Reward | KeywordReward],
        reward_process: RewardProcess | None,
        **kwargs: Any,
    ) -> None:
        self.rewards = rewards
        self.reward_failures = 0  # consecutive groups whose rewards failed
        self._reward_process = reward_process
        super().__init__(*args, **kwargs)

    def scores_of_groups(
        self,
        rows: Sequence[Prompt],
        completions: list[str],
        completion_ids: Sequence[list[int]],
        size: int,
    ) -> torch.Tensor:
        """Return the result of `scores`; with several ranks, each scores a part of the groups."""
        if self.ranks.size == 1:
            return self.scores(rows, completions, completion_ids, size)
        groups = run_of(len(rows) // size, self.ranks)
        own = slice(groups.start * size, groups.stop * size)
        extra, metrics = self._pending_extra_logs, self._pending_metrics
        self._pending_extra_logs, self._pending_metrics = defaultdict(list), defaultdict(list)
        outcomes: list[Outcome] = []
        found = torch.empty(0, len(self.rewards))
        if groups.start < groups.stop:
            found = self.scores(rows[own], completions[own], completion_ids[own], size, outcomes)
        part: dict[str, Any] = {
            "scores": found.tolist(),
            "extra": json.loads(json.dumps(self._pending_extra_logs, default=_plain)),
            "metrics": {
                name: list(map(float, numbers)) for name, numbers in self._pending_metrics.items()
            },
            "outcomes": outcomes,
        }
        self._pending_extra_logs, self._pending_metrics = extra, metrics
        parts = self.ranks.gather(part)
        for of_rank in parts:
            for column, values in of_rank["extra"].items():
                extra[column] += values
            for name, numbers in of_rank["metrics"].items():
                metrics[name] += numbers
            self._count_failures(of_rank["outcomes"])
        scores = [row for of_rank in parts for row in of_rank["scores"]]
        return torch.tensor(scores, device=self.accelerator.device)

    def scores(
        self,
        rows: Sequence[Prompt],
        completions: list[str],
        completion_ids: Sequence[list[int]],
        size: int,
        outcomes: list[Outcome] | None = None,
    ) -> torch.Tensor:
        """Return the score of each completion by each reward: (B, R) float32, NaN for None.

        `rows`: the prompt of each completion. `size`: completions that are left out together when
        their rewards fail in the reward process. `outcomes` receives the outcomes there; None:
        failures are counted at once.
        """
        if self._reward_process is not None:
            parts = [slice(start, start + size) for start in range(0, len(rows), size)]
            found = []
            for part in parts:
                scores, outcome = self._scores_of_process(
                    self._reward_process, rows[part], completions[part], completion_ids[part]
                )
                found.append(scores)
                if outcomes is None:
                    self._count_failures([outcome])
                else:
                    outcomes.append(outcome)
            return torch.cat(found).to(self.accelerator.device)
        inputs = [{"row": row} for row in rows]
        prompts = [row.text for row in rows]
        return cast(Any, super())._calculate_rewards(  # type: ignore[no-any-return]
            inputs, prompts, completions, completion_ids
        )

    def _scores_of_process(
        self,
        process: RewardProcess,
        rows: Sequence[Prompt],
        completions: list[str],
        completion_ids: Sequence[list[int]],
    ) -> tuple[torch.Tensor, Outcome]:
        """Return scores from the reward process, all NaN if the rewards fail."""
        try:
            answer = process.score(rows, completions, completion_ids, asdict(self.state))
        except RewardFailed as error:
            nothing = torch.full((len(rows), len(self.rewards)), torch.nan)
            return nothing, (rows[0].row, str(error))
        for column, values in answer.extra.items():
            self._log_completion_extra(column, values)
        for name, numbers in answer.metrics.items():
            for number in numbers:
                self._log_metric(name, number)
        scores = [[math.nan if one is None else one for one in row] for row in answer.scores]
        return torch.tensor(scores), None

    def _count_failures(self, outcomes: Sequence[Outcome]) -> None:
        """Report failures of rewards. Raises JobFailed after too many in a row."""
        step = self.state.global_step + 1
        for outcome in outcomes:
            if outcome is None:
                self.reward_failures = 0
                continue
            self.reward_failures += 1
            row, message = outcome
            self.job.emit("reward_failed", step=step, row=row, message=message)
            if self.reward_failures == MOST_FAILURES:
                raise JobFailed(
                    f"reward: must succeed for one of {MOST_FAILURES} consecutive groups, got "
                    f"none; the last one: {message}"
                )
