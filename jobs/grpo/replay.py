"""Experience replay (ARPO, arXiv:2505.16282): reuses earlier successes in groups without one.

The buffer has the latest successful trajectories of each task: completions of a prompt, or
episodes. When all of a group fail, a stored success replaces the first one, so that the group has
advantages. It is off-policy: the loss uses the log-probabilities of the policy that sampled it.
Imports torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Self

import torch

from ..engine.rollouts import Segment
from .batch import RewardWeights
from .trajectories import Trajectory

SUCCESS = 0.1  # a reward above it is stored
FLAT_STD, LOW_MEAN = 0.05, 0.2  # a group below both is failing


class ReplayBuffer:
    """The latest `size` successes of each task, first in, first out."""

    def __init__(self, size: int, weights: RewardWeights) -> None:
        self._size = size
        self._weights = weights
        self._stored: dict[int, deque[Trajectory]] = defaultdict(lambda: deque(maxlen=size))

    def apply(self, row: int, group: list[Trajectory], drawn: float) -> None:
        """Replace the first trajectory of a failing group, then store the group's successes.

        `row`: the index of its task. `drawn`: a number in [0, 1) that chooses among those stored.
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

    def copy(self) -> Self:
        """Return a buffer with the same trajectories."""
        found = type(self)(self._size, self._weights)
        for row, kept in self._stored.items():
            found._stored[row].extend(kept)
        return found

    def state(self, others: Callable[[Trajectory], dict[str, Any]]) -> dict[str, Any]:
        """Return the content as plain values: of each trajectory row, scores, segments, `others`.

        All that a source cannot tell from these is in `others`.
        """
        stored = [(row, one) for row, kept in self._stored.items() for one in kept]
        return {
            "rows": [row for row, _ in stored],
            "scores": [one.scores for _, one in stored],
            "segments": [[asdict(segment) for segment in one.segments] for _, one in stored],
            "others": [others(one) for _, one in stored],
        }

    def load_state(
        self,
        state: Mapping[str, Any],
        restored: Callable[[int, Mapping[str, Any]], Trajectory],
    ) -> None:
        """Restore the content from a `state`; `restored` makes a trajectory of a row and the rest.

        Earlier versions stored tensors, or no `others`.
        """
        self._stored.clear()
        state = {**state, **(_of_former(state) if "segments" not in state else {})}
        others = state.get("others", [{}] * len(state["rows"]))
        for row, scores, segments, more in zip(
            state["rows"], state["scores"], state["segments"], others, strict=True
        ):
            written = [Segment(**segment) for segment in segments]
            self._stored[row].append(restored(row, {"scores": scores, "segments": written, **more}))


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
