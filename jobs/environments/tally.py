"""Sums over the episodes of a training step, for its event. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Self

from .episodes import Episode


@dataclass
class Tally:
    """Sums over episodes. A failed one counts in `episodes`, `environment_s` and `ends` only.

    `played`: number of episodes that have not failed. `judged`: number of those whose environment
    reports a success or none; `success`: number of successes. `waited_s`: time in which
    environments worked and no turn was being generated. `retried`: number of repeated attempts.
    `parts`: sums of the parts of rewards, by name; `in_parts`: number of episodes that have each.
    """

    episodes: int = 0
    played: int = 0
    turns: int = 0
    contexts: int = 0
    observation_tokens: int = 0
    environment_s: float = 0.0
    waited_s: float = 0.0
    retried: int = 0
    judged: int = 0
    success: float = 0.0
    ends: dict[str, int] = field(default_factory=Counter)
    in_parts: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, episodes: Iterable[Episode], *, retried: int, waited_s: float) -> Self:
        """Count episodes that have ended."""
        found = cls(retried=retried, waited_s=waited_s)
        for one in episodes:
            found.episodes += 1
            found.environment_s += one.environment_s
            found.ends[one.reason] += 1
            if one.failure is None:
                found.played += 1
                found.turns += one.turns
                found.contexts += one.contexts
                found.in_parts = _sum(found.in_parts, dict.fromkeys(one.parts, 1))
                found.parts = _sum(found.parts, one.parts)
                given = (len(part.ids) for part in one.written if part.is_given)
                found.observation_tokens += sum(given)
                if one.success is not None:
                    found.judged += 1
                    found.success += one.success
        return found

    def __add__(self, other: Self) -> Self:
        names = [one.name for one in fields(self)]
        return type(self)(
            **{name: _sum(getattr(self, name), getattr(other, name)) for name in names}
        )

    def fields(self) -> dict[str, Any]:
        """Return the fields of the event: counts, and means over the played episodes."""
        found: dict[str, Any] = {
            "episodes": self.episodes,
            "turns": self.turns / max(self.played, 1),
            "observation_tokens": self.observation_tokens,
            "environment_s": self.environment_s,
            "waited_s": self.waited_s,
            "ends": dict(self.ends),
            "retried": self.retried,
        }
        if self.contexts > self.played:
            found["contexts"] = self.contexts / self.played
        if self.parts:
            found["parts"] = {n: total / self.in_parts[n] for n, total in self.parts.items()}
        if self.judged:
            found["success"] = self.success / self.judged
        return found


def _sum(one: Any, other: Any) -> Any:
    """Return the sum of numbers, or of the numbers of each name (Counter drops negative ones)."""
    if not isinstance(one, Mapping):
        return one + other
    return {name: one.get(name, 0) + other.get(name, 0) for name in {**one, **other}}
