"""The held-out evaluation of a GRPO job: the mean reward of sampled trajectories. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ..context import Context
from ..errors import Stopped
from ..intervals import interval_of
from .rollouts import Group
from .step import Reinforcement

BATCH = 16  # trajectories


class HeldOut:
    """Measures the mean reward of one trajectory per held-out task (training.loop.Measured).

    `during`: reports an activity of the training while a block runs; set once there is a training.
    """

    during: Callable[[str], AbstractContextManager[None]]

    def __init__(
        self,
        *,
        ctx: Context,
        model: Any,
        task: Reinforcement,
    ) -> None:
        self.during = lambda name: nullcontext()
        self._ctx = ctx
        self._model = model
        self._task = task
        self._groups = task.groups
        self._source = task.groups.source

    def measure(self) -> dict[str, Any] | None:
        """Return the mean reward of one sampled trajectory per held-out task; None when stopped.

        Trajectories without a score are left out, in `n` too, and counted as `unscored`; the reward
        is NaN, with a warning, when none is left. Each task has the same random numbers in every
        evaluation.
        """
        was_training = self._model.training
        self._model.eval()
        found: list[float] = []
        count = self._source.num_held_out
        for start in range(0, count, BATCH):
            if self._ctx.stop.is_set():
                return None
            with self.during("batch of an evaluation"):
                try:
                    found += self._rewards_of(range(start, min(start + BATCH, count)))
                except Stopped:  # within episodes
                    return None
        self._model.train(was_training)
        unscored = count - len(found)
        left_out = {"unscored": unscored, "completions": count} if unscored else {}
        if not found:
            message = f"the held-out reward is unknown: no reward scores any of {count} completions"
            self._ctx.emit(
                "warning", step=self._task.trainer_state()["global_step"], message=message
            )
            return {"reward": math.nan, "n": 0, **left_out}
        interval = interval_of(found)
        return {
            "reward": math.fsum(found) / len(found),
            "n": len(found),
            **left_out,
            **({} if interval is None else {"intervals": {"reward": interval}}),
        }

    def evaluated(self, found: dict[str, Any]) -> None:
        """Nothing depends on an evaluation."""

    def _rewards_of(self, rows: range) -> list[float]:
        """Return the rewards of trajectories of held-out tasks, but for the unscored."""
        groups = [Group(row, range(1)) for row in rows]
        found = []
        for (one,) in self._source.roll_out(groups, self._task.trainer_state()).groups:
            known = [
                weight * score
                for weight, score in zip(self._groups.weights.values, one.scores, strict=True)
                if not math.isnan(score)
            ]
            if known:
                found.append(math.fsum(known))
        return found
