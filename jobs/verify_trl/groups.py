"""Both sides of a GRPO job: TRL's trainer gets warmd's trajectories and their scores.

Imports torch and trl.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from datasets import Dataset
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from ..context import ONE_PROCESS, Context, Ranks, WarmModel
from ..grpo import setup as grpo_setup
from ..grpo.batch import completion_order
from ..grpo.options import GrpoSpec
from ..grpo.rollouts import Group, Sampled, Source
from ..models.architectures import check_can_generate
from ..models.vocabulary import Vocabulary
from ..sequences.padding import check_padding
from .sides import Sides, Stock, reference_folder


@dataclass(frozen=True)
class Rollout:
    """The trajectories of a step, group by group.

    `masks`: 1 for the tokens after a prompt that the policy wrote, 0 for those that it was given.
    """

    names: list[str]  # of the groups, each for all of its trajectories
    prompts: list[list[int]]
    completions: list[list[int]]
    masks: list[list[int]]
    scores: list[list[float]]  # by trajectory and reward, NaN for none
    order: list[int]  # in which the trajectories fill the micro-batches


class RecordedSource:
    """A rollouts.Source whose rollouts are kept; `seed`: of the job."""

    def __init__(self, source: Source, seed: int) -> None:
        self.rollouts: list[Rollout] = []
        self._source = source
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def roll_out(
        self, groups: Sequence[Group], state: Mapping[str, Any], ranks: Ranks = ONE_PROCESS
    ) -> Sampled:
        sampled = self._source.roll_out(groups, state, ranks)
        found = [one for group in sampled.groups for one in group]
        step = int(state["global_step"])
        self.rollouts.append(
            Rollout(
                names=[
                    f"{step} {number}" for number, group in enumerate(sampled.groups) for _ in group
                ],
                prompts=[one.prompt.ids for one in found],
                completions=[one.ids for one in found],
                masks=[[int(is_written) for is_written in one.is_written] for one in found],
                scores=[one.scores for one in found],
                order=completion_order(len(found), seed=self._seed, step=step),
            )
        )
        return sampled


def grpo(spec: GrpoSpec, ctx: Context, warm: WarmModel, stack: ExitStack) -> Sides:
    """Prepare both sides of a GRPO job; the stack ends its rewards, or its environment."""
    check_can_generate(warm.model)
    check_padding(warm)
    parts = spec.parts_by(ctx.rules)
    if spec.environment is None:
        vocabulary = Vocabulary.of(spec.model, warm.model, warm.tokenizer)
        setup = grpo_setup.completions_of(spec, ctx, warm, parts, vocabulary, stack)
    else:
        setup = grpo_setup.episodes_of(spec, ctx, warm, parts, stack)
    task, training = grpo_setup.training_of(spec, ctx, warm, setup, {}, measures=False)
    recorded: Any = RecordedSource(task.groups.source, spec.seed)
    task.groups.source = recorded

    def trainer(stock: Stock) -> Any:
        args = copy.copy(setup.config)
        args.output_dir = str(stock.folder)
        args.shuffle_dataset = False
        if args.beta and stock.lora is None:  # TRL reads the reference from the policy's folder
            stock.model.config.name_or_path = reference_folder(stock)
        replayed = stack.enter_context(Replayed(recorded.rollouts, spec.num_generations))
        return GRPOTrainer(
            model=stock.model,
            args=args,
            processing_class=stock.warm.tokenizer,
            train_dataset=replayed.dataset(),
            reward_funcs=[
                replayed.reward(number, name) for number, name in enumerate(setup.rewards)
            ],
            rollout_func=replayed.rollout,
            peft_config=stock.lora,
        )

    assert spec.steps_total is not None  # `verify` refuses a time limit
    return Sides(training, trainer, spec.steps_total)


class Replayed:
    """Recorded rollouts, for TRL's trainer: its data set, `rollout_func` and `reward_funcs`.

    A context manager: inside it, TRL's trainer shuffles the completions of a step by
    `torch.randperm` into the recorded order. Losses and metrics depend on which completions are in
    one micro-batch.
    """

    def __init__(self, rollouts: Sequence[Rollout], group_size: int) -> None:
        self._rollouts = rollouts
        self._group_size = group_size
        self._next = iter(rollouts)
        self._current = rollouts[0]
        self._is_shuffled = True  # whether TRL has shuffled the current rollout
        self._randperm = torch.randperm

    def __enter__(self) -> Self:
        torch.randperm = self._shuffle  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        torch.randperm = self._randperm

    def _shuffle(self, count: int, **how: Any) -> Tensor:
        if how or self._is_shuffled or count != len(self._current.order):
            return self._randperm(count, **how)
        self._is_shuffled = True
        return torch.tensor(self._current.order)

    def dataset(self) -> Dataset:
        """Return the names of all groups as prompts, in the order of the steps."""
        return Dataset.from_list(
            [
                {"prompt": name}
                for rollout in self._rollouts
                for name in rollout.names[:: self._group_size]
            ]
        )

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return the tokens of the next rollout, whose prompts these must be."""
        if not self._is_shuffled:
            raise AssertionError("TRL does not shuffle the completions by torch.randperm(count)")
        self._current, self._is_shuffled = next(self._next), False
        if prompts != self._current.names:
            raise AssertionError("TRL takes the prompts in another order")
        return {
            "prompt_ids": self._current.prompts,
            "completion_ids": self._current.completions,
            "env_mask": self._current.masks,
            "logprobs": None,
        }

    def reward(self, number: int, name: str) -> Callable[..., list[float | None]]:
        """Return a reward that gives the recorded scores of the current rollout."""

        def recorded(completions: Sequence[str], **_: Any) -> list[float | None]:
            scores = [of_one[number] for of_one in self._current.scores]
            return [None if math.isnan(score) else score for score in scores]

        recorded.__name__ = name
        return recorded
