"""The rollouts of a step: groups of completions of its prompts, sampled and judged by the rewards.

With dynamic sampling, groups without a spread of rewards are replaced; with replay, an earlier
success replaces a completion of a failing group. Rewards run in this process or, with a time limit,
in the reward process; with several ranks, each judges a part of the groups. Imports torch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..context import ONE_PROCESS, Context, Ranks
from ..engine.detokenizer import text_of
from ..engine.sampling import NotFiniteError
from ..errors import JobFailed
from ..keyed_numbers import uniform
from ..rewards.prompts import Prompt
from ..rewards.reward_calls import RewardCalls
from ..training.determinism import kept_settings
from ..training.epochs import Epochs, drawn_in_sequence
from ..training.finite import weight_norm
from .batch import RewardWeights
from .replay import ReplayBuffer
from .reward_process import RewardFailed, RewardProcess
from .sampler import Sampler, run_of
from .trajectories import Trajectory

MOST_FAILURES = 10  # consecutive groups whose rewards fail, after which the job fails


@dataclass
class Sampled:
    """Trajectories in groups, with event fields that count their changes, what rewards have
    logged, and the seconds of generation."""

    groups: list[list[Trajectory]]
    counts: dict[str, int]
    logged: dict[str, list[float]]
    seconds: float


class GroupSampler:
    """Samples the groups of each step of a job, by the options of a GRPOConfig.

    `resample`: how often groups with equal rewards are replaced by groups of the next prompts;
    `replay`: size of the replay buffer per prompt (0: none). Its state: the prompts that dynamic
    sampling has taken, the replay buffer, and the failures of rewards.
    """

    def __init__(
        self,
        *,
        ctx: Context,
        args: Any,
        model: Any,
        tokenizer: Any,
        sampler: Sampler,
        judge: Judge,
        prompts: Sequence[Prompt],
        resample: int = 0,
        replay: int = 0,
    ) -> None:
        self.sampler = sampler
        self.judge = judge
        self.prompts = list(prompts)
        self.weights = RewardWeights.of(args)
        self._ctx = ctx
        self._args = args
        self._model = model
        self._tokenizer = tokenizer
        self._replay = ReplayBuffer(replay, self.weights) if replay else None
        self._resample = resample
        order, count = drawn_in_sequence(len(prompts), args.seed), len(prompts)
        # With dynamic sampling, steps take different numbers of prompts: one by one.
        per_step = 1 if resample else self._groups_of_step
        self._epochs = Epochs(order, count, per_step, drops_rest=True)
        self._taken = 0  # prompts that dynamic sampling has taken

    @property
    def steps_of_epoch(self) -> int:
        """The steps that take each prompt once."""
        return len(self.prompts) // self._groups_of_step * int(self._args.num_iterations)

    @property
    def _groups_of_step(self) -> int:
        micro_batches = self._args.gradient_accumulation_steps
        completions = self._args.per_device_train_batch_size * micro_batches
        return int(completions // self._args.num_generations)

    def of_step(self, step: int, state: Mapping[str, Any]) -> Sampled:
        """Sample the groups of a step that begins after `step` steps; `state`: as for the Judge."""
        taken = Counter[int]()
        found = self._sampled(self._rows(step), state, taken)
        groups, resampled = found.groups, 0
        for _ in range(self._resample):
            flat = [i for i, one in enumerate(groups) if not self._has_spread(one)]
            more = self._sampled(self._next(len(flat)), state, taken)
            for i, group in zip(flat, more.groups, strict=True):
                groups[i] = group
            for name, values in more.logged.items():
                found.logged.setdefault(name, []).extend(values)
            found.seconds += more.seconds
            resampled += len(flat)
        if self._resample:
            found.counts["resampled"] = resampled
        if self._replay is not None:
            found.counts["replayed"] = sum(group[0].is_replayed for group in groups)
        if self.judge.can_fail:
            found.counts["left_out"] = sum(
                all(math.isnan(score) for one in group for score in one.scores) for group in groups
            )
        return found

    def _has_spread(self, group: list[Trajectory]) -> bool:
        return self.weights.has_spread(torch.tensor([one.scores for one in group]))

    def _rows(self, step: int) -> list[int]:
        """Return the prompts of a step: the next ones, or with dynamic sampling those of a stream.

        An epoch has all prompts, each once, but for a remainder that fills no step.
        """
        if self._resample:
            return self._next(self._groups_of_step)
        rows: list[int] = self._epochs.at(step // self._args.num_iterations)[1]
        return rows

    def _next(self, count: int) -> list[int]:
        """Return the next prompts of the epochs, without dropped remainders."""
        self._taken += count
        return [self._epochs.at(place)[1][0] for place in range(self._taken - count, self._taken)]

    def _sampled(
        self, rows: Sequence[int], state: Mapping[str, Any], taken: Counter[int]
    ) -> Sampled:
        """Return a group of each prompt: sampled, scored, and with a replayed success if due."""
        if not rows:
            return Sampled([], {}, {}, 0.0)
        size = self._args.num_generations
        prompts = [self.prompts[row] for row in rows for _ in range(size)]
        step = int(state["global_step"])
        numbers = self._uniform(rows, step, taken)
        written, logged, seconds = self.roll_out(
            prompts, numbers, state, event_step=step + 1, ranks=self._ctx.ranks
        )
        groups = [written[start : start + size] for start in range(0, len(written), size)]
        if self._replay is not None:
            for row, group in zip(rows, groups, strict=True):
                drawn = uniform(1, use="replay", seed=self._args.seed, step=step, row=row)
                self._replay.apply(row, group, float(drawn[0]))
                if group[0].is_replayed:
                    self._describe(group[0])
        return Sampled(groups, {}, logged, seconds)

    def _uniform(self, rows: Sequence[int], step: int, taken: Counter[int]) -> NDArray[np.float64]:
        """Return the numbers that decide the tokens of groups, by completion and position.

        They depend on seed, step, prompt, and number of the completion among those of its prompt in
        the step; `taken` counts the groups of each prompt so far.
        """
        size = self._args.num_generations
        found = []
        for row in rows:
            first = taken[row] * size
            taken[row] += 1
            for sample in range(first, first + size):
                found.append(self.numbers(step=step, row=row, sample=sample))
        return np.stack(found)

    def roll_out(
        self,
        prompts: Sequence[Prompt],
        numbers: NDArray[np.float64],
        state: Mapping[str, Any],
        *,
        event_step: int,
        ranks: Ranks = ONE_PROCESS,
    ) -> tuple[list[Trajectory], dict[str, list[float]], float]:
        """Sample a trajectory of each prompt and score it.

        `numbers`: one row of `numbers` per trajectory. `state`, `ranks`: as for the Judge. Returns
        the trajectories, what the rewards have logged, and the seconds of sampling.
        """
        began, step = time.perf_counter(), int(state["global_step"])
        try:
            found = self.sampler.sample([prompt.ids for prompt in prompts], numbers, ranks)
        except NotFiniteError as error:
            weight_norm(self._model, step)  # raises if the weights are the cause
            raise JobFailed(
                f"step {step + 1}: the model's probabilities are nan or infinite"
            ) from error
        written = [Trajectory(prompt, [one]) for prompt, one in zip(prompts, found, strict=True)]
        for one in written:
            self._describe(one)
        seconds = time.perf_counter() - began
        texts, ids = [one.text for one in written], [one.ids for one in written]
        size = self._args.num_generations
        judged = self.judge.scores(
            prompts, texts, ids, size=size, step=event_step, state=state, ranks=ranks
        )
        for one, scores in zip(written, judged.scores.tolist(), strict=True):
            one.scores = scores
        return written, judged.metrics, seconds

    def numbers(self, **fields: int) -> NDArray[np.float64]:
        """Return the numbers that decide the tokens of a completion, by position."""
        length = self._args.max_completion_length
        return uniform(length, use="completion", seed=self._args.seed, **fields)

    def _describe(self, one: Trajectory) -> None:
        """Set the text of a trajectory, as `eval` and answers have it, and whether it was cut."""
        one.text = text_of(self._tokenizer, one.prompt.ids, one.ids, self.sampler.ends)
        one.is_cut = one.ids[-1] not in (*self.sampler.ends, self._tokenizer.pad_token_id)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {
            "prompts_taken": self._taken,
            "replay": None if self._replay is None else self._replay.state(),
            "reward_failures": self.judge.failures,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; earlier versions wrote a part of it."""
        self._taken = state.get("prompts_taken", 0)
        self.judge.failures = state.get("reward_failures", 0)
        if self._replay is not None:
            self._replay.load_state(state["replay"], self.prompts)


class Judged(NamedTuple):
    """scores: (B, R) float32 on the CPU, NaN for None. metrics: what the rewards have logged."""

    scores: Tensor
    metrics: dict[str, list[float]]


class _Outcome(NamedTuple):
    """What the rewards return for some completions (see Scored), or why they have failed."""

    scores: list[list[float | None]]
    metrics: dict[str, list[float]]
    extra: list[str]
    failure: str | None


class Judge:
    """Scores completions by rewards, which this process calls, or the reward process.

    `failures` is its state: the number of consecutive groups whose rewards have failed.
    """

    def __init__(self, ctx: Context, calls: RewardCalls | RewardProcess, num_rewards: int) -> None:
        self.failures = 0
        self._ctx = ctx
        self._calls = calls
        self._num_rewards = num_rewards
        self._has_warned = False
        self._has_warned_of_none = False

    @property
    def can_fail(self) -> bool:
        """Whether a group is left out if its rewards fail; otherwise the job fails."""
        return isinstance(self._calls, RewardProcess)

    def scores(
        self,
        rows: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        *,
        size: int,
        step: int,
        state: Mapping[str, Any],
        ranks: Ranks = ONE_PROCESS,
    ) -> Judged:
        """Score completions of `rows`, their prompts; each rank gets the scores of all.

        `size`: completions that have a time limit together, and are left out together when their
        rewards fail. `step`: of events. `state`: the fields of TRL's trainer_state. Raises
        JobFailed.
        """
        starts = range(0, len(rows), size)
        parts = [slice(start, start + size) for start in starts[run_of(len(starts), ranks)]]
        if parts and not self.can_fail:
            parts = [slice(parts[0].start, parts[-1].stop)]
        found = []
        for part in parts:
            one = self._called(rows[part], completions[part], completion_ids[part], state)
            if ranks.size == 1:
                self._count(one, rows[part.start], step)
            found.append(one)
        if ranks.size > 1:
            found = [_Outcome(*one) for of_rank in ranks.gather(found) for one in of_rank]
            for number, one in enumerate(found):
                self._count(one, rows[number * size], step)
        judged = self._judged(found)
        if all(one.failure is None for one in found):
            self._warn_of_none(judged.scores, rows, step)
        return judged

    def _called(
        self,
        rows: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        state: Mapping[str, Any],
    ) -> _Outcome:
        try:
            with kept_settings():
                found = self._calls.score(rows, completions, completion_ids, state)
        except RewardFailed as error:
            return _Outcome([[None] * self._num_rewards] * len(rows), {}, [], str(error))
        return _Outcome(found.scores, found.metrics, found.extra, None)

    def _judged(self, found: Sequence[_Outcome]) -> Judged:
        metrics: dict[str, list[float]] = {}
        for one in found:
            for name, values in one.metrics.items():
                metrics.setdefault(name, []).extend(values)
            self._warn_of_extra(one.extra)
        scores = [
            [math.nan if score is None else score for score in row]
            for one in found
            for row in one.scores
        ]
        return Judged(torch.tensor(scores, dtype=torch.float32), metrics)

    def _count(self, outcome: _Outcome, prompt: Prompt, step: int) -> None:
        """Count and report a failure of rewards. Raises JobFailed after too many in a row."""
        failure = outcome.failure
        if failure is None:
            self.failures = 0
            return
        self.failures += 1
        self._ctx.emit("reward_failed", step=step, row=prompt.row, message=failure)
        # Rank 0 decides: it alone evaluates, so that the other ranks count less.
        if self.failures == MOST_FAILURES and self._ctx.ranks.rank == 0:
            raise JobFailed(
                f"reward: must succeed for one of {MOST_FAILURES} consecutive groups, got none; "
                f"the last one: {failure}"
            )

    def _warn_of_none(self, scores: Tensor, rows: Sequence[Prompt], step: int) -> None:
        """Warn once of completions that no reward scores."""
        is_none = scores.isnan().all(1)
        if self._has_warned_of_none or not is_none.any():
            return
        self._has_warned_of_none = True
        first = rows[int(is_none.nonzero()[0])]
        self._ctx.emit(
            "warning",
            step=step,
            message=f"reward: {int(is_none.sum())} of {len(is_none)} completions have no score "
            f"from any reward and are left out, the first one of row {first.row}",
        )

    def _warn_of_extra(self, columns: Sequence[str]) -> None:
        if columns and not self._has_warned:
            self._has_warned = True
            self._ctx.emit(
                "warning",
                message=f"reward: the column {columns[0]} of log_extra is not recorded; log_metric "
                "is, by the trackers of report_to",
            )
