"""What a rollout returns: trajectories, made of the segments that the model and others wrote.

A completion of a single turn is a trajectory of one segment. Imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..engine.rollouts import Segment
from ..rewards.prompts import Prompt


@dataclass
class Trajectory:
    """The segments after one prompt, and what they are worth.

    `scores`: by each reward, NaN for none. `is_cut`: it stopped at a limit, not by an end token.
    `is_replayed`: it is an earlier one (`replay`). `about`: JSON that its line of completions.jsonl
    has of it, too.
    """

    prompt: Prompt
    segments: list[Segment]
    text: str = ""
    scores: list[float] = field(default_factory=list)
    is_cut: bool = False
    is_replayed: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ids(self) -> list[int]:
        """The tokens after the prompt."""
        return [token for one in self.segments for token in one.ids]

    @property
    def is_written(self) -> list[bool]:
        """Whether the model wrote each of these tokens."""
        return [not one.is_given for one in self.segments for _ in one.ids]

    @property
    def entropies(self) -> list[float]:
        """The entropy at each of these tokens, 0 where it was given."""
        return [nats for one in self.segments for nats in one.entropies or [0.0] * len(one.ids)]

    @property
    def logps(self) -> list[float]:
        """The log-probability of each of these tokens, 0 where it is not known."""
        return [nats for one in self.segments for nats in one.logps or [0.0] * len(one.ids)]
