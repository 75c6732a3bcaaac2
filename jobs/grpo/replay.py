"""Experience replay (ARPO, arXiv:2505.16282): reuses earlier successes in groups without one.

The buffer has the latest successful completions of each prompt. When all completions of a group
fail, a stored success replaces the first one, so that the group has advantages. It is off-policy:
the loss uses the log-probabilities of the policy that sampled it. Imports torch.
"""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .groups import Group, RewardWeights
from .rollout import Completion

SUCCESS = 0.1  # a reward above it is stored
FLAT_STD, LOW_MEAN = 0.05, 0.2  # a group below both is failing


class Stored(NamedTuple):
    """A completion with its scores by each reward."""

    completion: Completion
    scores: Tensor  # (R,)


class ReplayBuffer:
    """The latest `size` successes of each prompt, first in, first out."""

    def __init__(self, size: int, weights: RewardWeights) -> None:
        self._weights = weights
        self._stored: dict[int, deque[Stored]] = defaultdict(lambda: deque(maxlen=size))

    def apply(self, group: Group, drawn: float) -> None:
        """Replace the first completion of a failing group, then store the group's successes.

        `drawn`: a number in [0, 1) that chooses among the stored ones.
        """
        rewards = self._weights.rewards(group.scores)
        succeeds = (rewards > SUCCESS).tolist()
        sampled = list(zip(group.completions, group.scores.clone(), succeeds, strict=True))
        known = rewards[~rewards.isnan()]
        stored = self._stored.get(group.row)
        if stored and len(known) > 1 and known.std() < FLAT_STD and known.mean() < LOW_MEAN:
            chosen = stored[int(drawn * len(stored))]
            group.completions = [chosen.completion, *group.completions[1:]]
            group.scores[0] = chosen.scores
            group.replayed = True
        for completion, scores, is_success in sampled:
            if is_success:
                self._stored[group.row].append(Stored(completion, scores))

    def state(self) -> dict[str, Tensor]:
        """Return the content as tensors: for each completion its prompt, length and scores; then
        the tokens and log-probabilities of all of them, one after another."""
        rows = [row for row, stored in self._stored.items() for _ in stored]
        all_stored = [one for stored in self._stored.values() for one in stored]
        written = [one.completion for one in all_stored]
        return {
            "rows": torch.tensor(rows, dtype=torch.int64),
            "lengths": torch.tensor([len(c.ids) for c in written], dtype=torch.int64),
            "scores": torch.stack([s.scores for s in all_stored]) if written else torch.empty(0),
            "ids": torch.tensor([i for c in written for i in c.ids], dtype=torch.int64),
            "logps": torch.tensor([p for c in written for p in c.logps], dtype=torch.float64),
            "entropies": torch.tensor(
                [nats for c in written for nats in c.entropies], dtype=torch.float64
            ),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the content from a `state`."""
        self._stored.clear()
        lengths = state["lengths"].tolist()
        parts = (state[name].split(lengths) for name in ("ids", "logps", "entropies"))
        for row, scores, ids, logps, entropies in zip(
            state["rows"].tolist(), state["scores"], *parts, strict=True
        ):
            completion = Completion(ids.tolist(), entropies.tolist(), logps.tolist())
            self._stored[row].append(Stored(completion, scores))
