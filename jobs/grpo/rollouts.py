"""The rollouts of a step: groups of trajectories of its tasks, sampled and judged.

A task is a prompt, which completions answer (`completion_source`), or what an episode is about
(`episode_source`). With dynamic sampling, groups without a spread of rewards are replaced; with
replay, an earlier success replaces a trajectory of a failing group. Imports torch.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ..context import ONE_PROCESS, Ranks
from ..environments.tally import Tally
from ..errors import Stopped
from ..keyed_numbers import uniform
from ..training.epochs import Epochs, drawn_in_sequence
from .batch import RewardWeights
from .replay import ReplayBuffer
from .sampler import Sampler
from .trajectories import Trajectory


@dataclass(frozen=True)
class Group:
    """A group to roll out: the task's index, and the numbers of its samples within the step.

    `step`: number of steps done before; None: the task is held out.
    """

    row: int
    samples: range
    step: int | None = None

    def numbers(self, sample: int, length: int, *, seed: int, **more: int) -> NDArray[np.float64]:
        """Return the random numbers that decide `length` tokens of a sample, by position."""
        fields = {"held_out": self.row}
        if self.step is not None:
            fields = {"step": self.step, "row": self.row, "sample": sample}
        return uniform(length, use="completion", seed=seed, **fields, **more)


@dataclass
class Sampled:
    """Groups of trajectories, what rewards have logged, and the seconds of generation.

    `tally`: of episodes. `counts`: for the event of the step.
    """

    groups: list[list[Trajectory]]
    logged: dict[str, list[float]] = field(default_factory=dict)
    seconds: float = 0.0
    tally: Tally | None = None
    counts: dict[str, Any] = field(default_factory=dict)

    def add(self, more: Sampled) -> None:
        """Count other groups of the same step, too; `groups` stay as they are."""
        for name, values in more.logged.items():
            self.logged.setdefault(name, []).extend(values)
        self.seconds += more.seconds
        if self.tally is not None and more.tally is not None:
            self.tally += more.tally


class Source(Protocol):
    """Samples and scores trajectories: `completion_source` or `episode_source`.

    `num_tasks`, `num_held_out`: number of tasks to train and to evaluate on. `can_fail`: whether
    whole groups may have no score; they are left out.
    """

    sampler: Sampler

    @property
    def num_tasks(self) -> int: ...

    @property
    def num_held_out(self) -> int: ...

    @property
    def can_fail(self) -> bool: ...

    def roll_out(
        self, groups: Sequence[Group], state: Mapping[str, Any], ranks: Ranks = ONE_PROCESS
    ) -> Sampled:
        """Sample the trajectories of groups of one size, and score them.

        `state`: the fields of TRL's trainer_state. Each rank gets the trajectories of all ranks.
        Raises JobFailed and Stopped.
        """

    def stored(self, one: Trajectory) -> dict[str, Any]:
        """Return what a replay buffer stores of a trajectory besides row, scores and segments."""

    def restored(self, row: int, stored: Mapping[str, Any]) -> Trajectory:
        """Return a trajectory of a replay buffer: its segments, scores, and what `stored` gave."""

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; earlier versions wrote a part of it."""


def groups_of_step(args: Any) -> int:
    """Return the groups of a step, by the options of a GRPOConfig."""
    trajectories = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return int(trajectories // args.num_generations)


class GroupSampler:
    """Samples the groups of each step of a job, by the options of a GRPOConfig.

    `resample`: how often groups with equal rewards are replaced by groups of the next tasks;
    `replay`: size of the replay buffer per task (0: none). Its state: the tasks that dynamic
    sampling has taken, the replay buffer, and that of the source.
    """

    def __init__(
        self,
        source: Source,
        args: Any,
        *,
        ranks: Ranks = ONE_PROCESS,
        resample: int = 0,
        replay: int = 0,
    ) -> None:
        self.source = source
        self.weights = RewardWeights.of(args)
        self._args = args
        self._ranks = ranks
        self._groups_of_step = groups_of_step(args)
        self._replay = ReplayBuffer(replay, self.weights) if replay else None
        self._resample = resample
        order, count = drawn_in_sequence(source.num_tasks, args.seed), source.num_tasks
        # With dynamic sampling, steps take different numbers of tasks: one by one.
        per_step = 1 if resample else self._groups_of_step
        self._epochs = Epochs(order, count, per_step, drops_rest=True)
        self._taken = 0  # tasks that dynamic sampling has taken

    @property
    def sampler(self) -> Sampler:
        """What samples the tokens."""
        return self.source.sampler

    @property
    def steps_of_epoch(self) -> int:
        """The steps that take each task once."""
        return self.source.num_tasks // self._groups_of_step * int(self._args.num_iterations)

    def of_step(self, step: int, state: Mapping[str, Any]) -> Sampled:
        """Sample the groups of a step that begins after `step` steps.

        `state`: the fields of TRL's trainer_state. Raises JobFailed, and Stopped if a request to
        stop has come meanwhile: the state is then the one before the call.
        """
        # With a single round nothing is stored before all of it is sampled.
        kept = self._replay and (self._replay.copy() if self._resample else self._replay)
        before = self._taken, kept, self.source.state()
        try:
            return self._of_step(step, state)
        except Stopped:
            self._taken, self._replay = before[:2]
            self.source.load(before[2])
            raise

    def _of_step(self, step: int, state: Mapping[str, Any]) -> Sampled:
        taken = Counter[int]()
        found = self._sampled(self._rows(step), state, taken)
        groups, resampled = found.groups, 0
        for _ in range(self._resample):
            flat = [i for i, one in enumerate(groups) if not self._has_spread(one)]
            if not flat:
                break
            more = self._sampled(self._next(len(flat)), state, taken)
            for i, group in zip(flat, more.groups, strict=True):
                groups[i] = group
            found.add(more)
            resampled += len(flat)
        if found.tally is not None:
            found.counts.update(found.tally.fields())
        if self._resample:
            found.counts["resampled"] = resampled
        if self._replay is not None:
            found.counts["replayed"] = sum(group[0].is_replayed for group in groups)
        if self.source.can_fail:
            found.counts["left_out"] = sum(
                all(math.isnan(score) for one in group for score in one.scores) for group in groups
            )
        return found

    def _has_spread(self, group: list[Trajectory]) -> bool:
        return self.weights.has_spread(torch.tensor([one.scores for one in group]))

    def _rows(self, step: int) -> list[int]:
        """Return the tasks of a step: the next ones, or with dynamic sampling those of a stream.

        An epoch has all tasks, each once, but for a remainder that fills no step.
        """
        if self._resample:
            return self._next(self._groups_of_step)
        rows: list[int] = self._epochs.at(step // self._args.num_iterations)[1]
        return rows

    def _next(self, count: int) -> list[int]:
        """Return the next tasks of the epochs, without dropped remainders."""
        self._taken += count
        return [self._epochs.at(place)[1][0] for place in range(self._taken - count, self._taken)]

    def _sampled(
        self, rows: Sequence[int], state: Mapping[str, Any], taken: Counter[int]
    ) -> Sampled:
        """Return a group of each task: sampled, scored, and with a replayed success if due.

        `taken` counts the groups of each task in this step so far: the next ones have other
        samples.
        """
        size, step = self._args.num_generations, int(state["global_step"])
        wanted = []
        for row in rows:
            first = taken[row] * size
            taken[row] += 1
            wanted.append(Group(row, range(first, first + size), step))
        found = self.source.roll_out(wanted, state, self._ranks)
        if self._replay is not None:
            for row, group in zip(rows, found.groups, strict=True):
                drawn = uniform(1, use="replay", seed=self._args.seed, step=step, row=row)
                self._replay.apply(row, group, float(drawn[0]))
        return found

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "prompts_taken": self._taken,
            "replay": None if self._replay is None else self._replay.state(self.source.stored),
            **self.source.state(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; earlier versions wrote a part of it."""
        self._taken = state.get("prompts_taken", 0)
        if self._replay is not None:
            self._replay.load_state(state["replay"], self.source.restored)
        self.source.load(state)
