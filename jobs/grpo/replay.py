"""Experience replay (ARPO, arXiv:2505.16282): reuses earlier successes in groups without one.

The buffer has the latest successful completions of each prompt. When all completions of a group
fail, a stored success replaces the first one, so that the group has advantages. It is off-policy:
the loss uses the log-probabilities of the policy that sampled it. Imports torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from ..engine.rollouts import Segment
from ..rewards.prompts import Prompt
from .batch import RewardWeights
from .trajectories import Trajectory

SUCCESS = 0.1  # a reward above it is stored
FLAT_STD, LOW_MEAN = 0.05, 0.2  # a group below both is failing


class ReplayBuffer:
    """The latest `size` successes of each prompt, first in, first out."""

    def __init__(self, size: int, weights: RewardWeights) -> None:
        self._weights = weights
        self._stored: dict[int, deque[Trajectory]] = defaultdict(lambda: deque(maxlen=size))

    def apply(self, row: int, group: list[Trajectory], drawn: float) -> None:
        """Replace the first completion of a failing group, then store the group's successes.

        `row`: the index of its prompt. `drawn`: a number in [0, 1) that chooses among those stored.
        """
        rewards = self._weights.rewards(torch.tensor([one.scores for one in group]))
        succeeds = (rewards > SUCCESS).tolist()
        successes = [one for one, is_success in zip(group, succeeds, strict=True) if is_success]
        known = rewards[~rewards.isnan()]
        stored = self._stored.get(row)
        if stored and len(known) > 1 and known.std() < FLAT_STD and known.mean() < LOW_MEAN:
            group[0] = replace(stored[int(drawn * len(stored))], is_replayed=True)
        if successes:
            self._stored[row].extend(successes)

    def state(self) -> dict[str, Any]:
        """Return the content as plain values: row, scores and segments of each completion."""
        stored = [(row, one) for row, kept in self._stored.items() for one in kept]
        return {
            "rows": [row for row, _ in stored],
            "scores": [one.scores for _, one in stored],
            "segments": [[asdict(segment) for segment in one.segments] for _, one in stored],
        }

    def load_state(self, state: Mapping[str, Any], prompts: Sequence[Prompt]) -> None:
        """Restore the content from a `state`; earlier versions stored tensors."""
        self._stored.clear()
        state = {**state, **(_of_former(state) if "segments" not in state else {})}
        for row, scores, segments in zip(
            state["rows"], state["scores"], state["segments"], strict=True
        ):
            written = [Segment(**segment) for segment in segments]
            self._stored[row].append(Trajectory(prompts[row], written, scores=scores))


def _of_former(state: Mapping[str, Any]) -> dict[str, Any]:
    """Convert what earlier versions stored: the tokens of all completions, one after another."""
    lengths = state["lengths"].tolist()
    names = ("ids", "entropies", "logps")
    parts = [[one.tolist() for one in state[name].split(lengths)] for name in names]
    return {
        "rows": state["rows"].tolist(),
        "scores": state["scores"].tolist(),
        "segments": [
            [dict(zip(names, values, strict=True))] for values in zip(*parts, strict=True)
        ],
    }
