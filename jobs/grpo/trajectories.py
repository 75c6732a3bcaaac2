"""What a rollout returns: trajectories, made of the segments that the model and others wrote.

A completion of a single turn is a trajectory of one segment. A trajectory has several contexts
where an agent has rewritten its history: each token is learned in the context in which it was
sampled. Imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..engine.rollouts import Segment
from ..rewards.prompts import Prompt


class Context(NamedTuple):
    """A prompt, and the tokens of a trajectory that follow it: those from `begin` to `end` - 1."""

    prompt: list[int]
    begin: int
    end: int


@dataclass
class Trajectory:
    """The segments after one prompt or, in several contexts, after several; what they are worth.

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
        """The tokens after the prompt, or after those of all contexts."""
        return [token for one in self.segments for token in one.ids]

    @property
    def contexts(self) -> list[Context]:
        """The contexts, of which the first has the prompt of the trajectory."""
        found = [Context(self.prompt.ids, 0, 0)]
        for one in self.segments:
            if one.prompt is not None:
                found.append(Context(one.prompt, found[-1].end, found[-1].end))
            found[-1] = found[-1]._replace(end=found[-1].end + len(one.ids))
        return found

    @property
    def num_tokens(self) -> int:
        """The number of all tokens, prompts included."""
        return sum(len(one.prompt) for one in self.contexts) + len(self.ids)

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
