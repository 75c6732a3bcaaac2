"""Both sides of a GRPO job: TRL's trainer gets warmd's completions and their scores.

Imports torch and trl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Self

import torch
from datasets import Dataset
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from ..context import Context, WarmModel
from ..grpo import kind
from ..grpo.batch import completion_order
from ..grpo.options import GrpoSpec
from ..grpo.reward_sources import Sources
from ..grpo.rollouts import Judge, Judged
from ..models.architectures import check_can_generate
from ..models.vocabulary import Vocabulary
from ..rewards.prompts import Prompt
from ..sequences.padding import check_padding
from .sides import Sides, Stock, reference_folder


@dataclass(frozen=True)
class Rollout:
    """The completions of a step, group by group: prompts and completions have the same order."""

    prompts: Sequence[Prompt]
    completions: Sequence[list[int]]
    scores: Tensor  # (completions, rewards), NaN for none
    order: list[int]  # in which the completions fill the micro-batches


class RecordingJudge:
    """A judge whose completions and scores are kept; `seed`: of the job."""

    def __init__(self, judge: Judge, seed: int) -> None:
        self.rollouts: list[Rollout] = []
        self._judge = judge
        self._seed = seed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._judge, name)

    def scores(
        self,
        rows: Sequence[Prompt],
        completions: Sequence[str],
        completion_ids: Sequence[list[int]],
        **how: Any,
    ) -> Judged:
        judged = self._judge.scores(rows, completions, completion_ids, **how)
        step = how["state"]["global_step"]
        order = completion_order(len(rows), seed=self._seed, step=step)
        self.rollouts.append(Rollout(list(rows), list(completion_ids), judged.scores, order))
        return judged


def grpo(spec: GrpoSpec, ctx: Context, warm: WarmModel, stack: ExitStack) -> Sides:
    """Prepare both sides of a GRPO job; the stack ends its rewards."""
    check_can_generate(warm.model)
    parts = spec.parts_by(ctx.rules)
    vocabulary = Vocabulary.of(spec.model, warm.model, warm.tokenizer)
    check_padding(warm)
    prompts = kind.encoded(spec, warm, parts.training, vocabulary)
    all_prompts = prompts + kind.encoded(spec, warm, parts.held_out, vocabulary)
    functions = spec.reward_functions(parts.training)
    calls = stack.enter_context(kind.reward_calls(spec, functions, all_prompts))
    config = kind.config_of(spec, ctx, warm, all_prompts)
    task, training = kind.training_of(
        spec, ctx, warm, config, prompts, [], calls, functions, {}, Sources(functions.values())
    )
    judge: Any = RecordingJudge(task.groups.judge, spec.seed)
    task.groups.judge = judge

    def trainer(stock: Stock) -> Any:
        args = kind.config_of(spec, stock.ctx, stock.warm, all_prompts)
        args.output_dir = str(stock.folder)
        args.shuffle_dataset = False
        if args.beta and stock.lora is None:  # TRL reads the reference from the policy's folder
            stock.model.config.name_or_path = reference_folder(stock)
        replayed = stack.enter_context(Replayed(judge.rollouts, spec.num_generations))
        return GRPOTrainer(
            model=stock.model,
            args=args,
            processing_class=stock.warm.tokenizer,
            train_dataset=replayed.dataset(),
            reward_funcs=[replayed.reward(number, name) for number, name in enumerate(functions)],
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
        """Return the prompts of all groups, in the order of the steps."""
        return Dataset.from_list(
            [
                {"prompt": prompt.text}
                for rollout in self._rollouts
                for prompt in rollout.prompts[:: self._group_size]
            ]
        )

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Return the tokens of the next rollout, whose prompts these must be."""
        if not self._is_shuffled:
            raise AssertionError("TRL does not shuffle the completions by torch.randperm(count)")
        self._current, self._is_shuffled = next(self._next), False
        if prompts != [prompt.text for prompt in self._current.prompts]:
            raise AssertionError("TRL takes the prompts in another order")
        return {
            "prompt_ids": [prompt.ids for prompt in self._current.prompts],
            "completion_ids": self._current.completions,
            "logprobs": None,
        }

    def reward(self, number: int, name: str) -> Callable[..., list[float | None]]:
        """Return a reward that gives the recorded scores of the current rollout."""

        def recorded(completions: Sequence[str], **_: Any) -> list[float | None]:
            scores = self._current.scores[:, number].tolist()
            return [None if math.isnan(score) else score for score in scores]

        recorded.__name__ = name
        return recorded
