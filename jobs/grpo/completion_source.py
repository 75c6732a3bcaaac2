"""Single-turn trajectories: completions of prompts, scored by rewards. Imports torch.

A completion depends on its prompt, the weights and its random numbers, not on the batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..context import ONE_PROCESS, Ranks
from ..engine.detokenizer import text_of
from ..rewards.prompts import Prompt
from .judge import Judge
from .rollouts import Group, Sampled
from .sampler import Sampler, finite_probabilities
from .trajectories import Trajectory


class CompletionSource:
    """Samples completions of prompts and lets rewards judge them (rollouts.Source).

    `args`: a GRPOConfig. `held_out`: the prompts of evaluations. Its state: the failures of the
    rewards.
    """

    def __init__(
        self,
        *,
        args: Any,
        model: Any,
        tokenizer: Any,
        sampler: Sampler,
        judge: Judge,
        prompts: Sequence[Prompt],
        held_out: Sequence[Prompt] = (),
    ) -> None:
        self.sampler = sampler
        self.judge = judge
        self._args = args
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = list(prompts)
        self._held_out = list(held_out)

    @property
    def num_tasks(self) -> int:
        return len(self._prompts)

    @property
    def num_held_out(self) -> int:
        return len(self._held_out)

    @property
    def can_fail(self) -> bool:
        return self.judge.can_fail

    def roll_out(
        self, groups: Sequence[Group], state: Mapping[str, Any], ranks: Ranks = ONE_PROCESS
    ) -> Sampled:
        began, step = time.perf_counter(), int(state["global_step"])
        prompts, numbers = [], []
        for group in groups:
            prompt = (self._held_out if group.step is None else self._prompts)[group.row]
            for sample in group.samples:
                prompts.append(prompt)
                numbers.append(
                    group.numbers(sample, self._args.max_completion_length, seed=self._args.seed)
                )
        with finite_probabilities(self._model, step):
            found = self.sampler.sample([one.ids for one in prompts], np.stack(numbers), ranks)
        written = [Trajectory(prompt, [one]) for prompt, one in zip(prompts, found, strict=True)]
        for one in written:
            self._describe(one)
        seconds = time.perf_counter() - began
        is_trained = groups[0].step is not None
        judged = self.judge.scores(
            prompts,
            [one.text for one in written],
            [one.ids for one in written],
            size=self._args.num_generations,  # that have a time limit together
            step=step + is_trained,
            state=state,
            ranks=ranks,
        )
        for one, scores in zip(written, judged.scores.tolist(), strict=True):
            one.scores = scores
        of_group = len(groups[0].samples)
        starts = range(0, len(written), of_group)
        return Sampled(
            [written[start : start + of_group] for start in starts], judged.metrics, seconds
        )

    def _describe(self, one: Trajectory) -> None:
        """Set the text of a trajectory, as `eval` and answers have it, and whether it was cut."""
        one.text = text_of(self._tokenizer, one.prompt.ids, one.ids, self.sampler.ends)
        one.is_cut = one.ids[-1] not in (*self.sampler.ends, self._tokenizer.pad_token_id)

    def stored(self, one: Trajectory) -> dict[str, Any]:
        return {}  # the prompt is the row's, and the text follows from the tokens

    def restored(self, row: int, stored: Mapping[str, Any]) -> Trajectory:
        found = Trajectory(self._prompts[row], stored["segments"], scores=stored["scores"])
        self._describe(found)
        return found

    def state(self) -> dict[str, Any]:
        return {"reward_failures": self.judge.failures}

    def load(self, state: Mapping[str, Any]) -> None:
        self.judge.failures = state.get("reward_failures", 0)
