"""The held-out evaluation of a GRPO job: the mean reward of sampled completions. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from ..context import Context
from ..intervals import interval_of
from ..rewards.prompts import Prompt
from .step import Reinforcement

BATCH = 16  # completions


class HeldOut:
    """Measures the mean reward of one completion per held-out prompt (training.loop.Measured).

    `during`: reports an activity of the training while a block runs; set once there is a training.
    """

    during: Callable[[str], AbstractContextManager[None]]

    def __init__(
        self,
        *,
        ctx: Context,
        model: Any,
        task: Reinforcement,
        prompts: Sequence[Prompt],
    ) -> None:
        self.during = lambda name: nullcontext()
        self._ctx = ctx
        self._model = model
        self._task = task
        self._groups = task.groups
        self._prompts = prompts

    def measure(self) -> dict[str, Any] | None:
        """Return the mean reward of one sampled completion per held-out prompt; None when stopped.

        Completions for which every reward returns None are left out, in `n` too, and counted as
        `unscored`; the reward is NaN, with a warning, when none is left. Each prompt has the same
        random numbers in every evaluation.
        """
        was_training = self._model.training
        self._model.eval()
        found: list[float] = []
        for start in range(0, len(self._prompts), BATCH):
            if self._ctx.stop.is_set():
                return None
            with self.during("batch of an evaluation"):
                found += self._rewards_of(start)
        self._model.train(was_training)
        count = len(self._prompts)
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

    def _rewards_of(self, start: int) -> list[float]:
        """Return the rewards of completions of a batch of held-out prompts, but for the unscored.

        `start`: the number of its first prompt.
        """
        prompts = self._prompts[start : start + BATCH]
        numbers = [self._groups.numbers(held_out=start + place) for place in range(len(prompts))]
        state = self._task.trainer_state()
        rolled_out, _, _ = self._groups.roll_out(
            prompts, np.stack(numbers), state, event_step=state["global_step"]
        )
        found = []
        for one in rolled_out:
            known = [
                weight * score
                for weight, score in zip(self._groups.weights.values, one.scores, strict=True)
                if not math.isnan(score)
            ]
            if known:
                found.append(math.fsum(known))
        return found
