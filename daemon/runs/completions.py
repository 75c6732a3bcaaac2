"""The completions that a job was trained on: from its file, or in earlier versions from events."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...jobs.grpo import completions
from . import events
from .rundir import RunDir

# Fields of a completion. An episode has `turns`, `success`, and if it failed `error`, too.
FIELDS = (
    *("step", "prompt", "completion", "rewards", "reward", "advantage"),
    *("row", "group", "answer", "tokens", "stop", "replayed"),
)


@dataclass(frozen=True)
class Wanted:
    """Which completions of a job to show.

    `step`: of this step; None: of all steps, or of the latest one unless `row` or `text` is given.
    `row`: of the prompt in this row of the data. `text`: with this text, in upper or lower case.
    `worst`, `best`: so many of them, by reward.
    """

    step: int | None = None
    row: int | None = None
    text: str | None = None
    worst: int | None = None
    best: int | None = None

    @property
    def is_of_all_steps(self) -> bool:
        """Whether completions of several steps may be found."""
        return self.step is None and (self.row is not None or self.text is not None)

    def select(self, found: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the wanted ones of all completions, which come in the order of steps."""
        kept: list[dict[str, Any]] = []
        for one in found:
            if self.step is not None and one["step"] != self.step:
                continue
            if not self.is_of_all_steps and kept and kept[-1]["step"] != one["step"]:
                kept.clear()  # of an earlier step than the latest
            if self._has(one):
                kept.append(one)
        if self.worst is not None:
            return heapq.nsmallest(self.worst, filter(_has_reward, kept), key=_reward)
        if self.best is not None:
            return heapq.nlargest(self.best, filter(_has_reward, kept), key=_reward)
        return kept

    def _has(self, one: Mapping[str, Any]) -> bool:
        if self.row is not None and one["row"] != self.row:
            return False
        return self.text is None or self.text.casefold() in one["completion"].casefold()


def read(rundir: RunDir) -> Iterator[dict[str, Any]]:
    """Yield the completions of a job that are kept, with all FIELDS, in the order of steps.

    Earlier versions had a few in each event, cut to 200 characters: the other fields are None then,
    but for the reward where it has one part.
    """
    path = rundir.path / completions.FILE
    if path.exists():
        yield from completions.read(path)
        return
    for event in events.read(rundir.events):
        if event["type"] == "step":
            for one in event.get("samples") or ():
                parts = list((one.get("rewards") or {}).values())
                reward = parts[0] if len(parts) == 1 else None
                yield {**dict.fromkeys(FIELDS), "step": event["step"], "reward": reward, **one}


def _reward(one: Mapping[str, Any]) -> float:
    reward: float = one["reward"]
    return reward


def _has_reward(one: Mapping[str, Any]) -> bool:
    return one["reward"] is not None
