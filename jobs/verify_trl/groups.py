"""Both sides of a GRPO job: TRL's trainer gets warmd's completions and their scores.

Imports torch and trl.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from ..context import Context, WarmModel
from ..grpo import kind
from ..grpo.judging import Judge, Judged
from ..grpo.options import GrpoSpec
from ..grpo.reward_sources import Sources
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
    random_numbers: Tensor  # the state of torch's generator after the rewards


class RecordingJudge:
    """A judge whose completions and scores are kept."""

    def __init__(self, judge: Judge) -> None:
        self.rollouts: list[Rollout] = []
        self._judge = judge

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
        state = torch.get_rng_state()
        self.rollouts.append(Rollout(list(rows), list(completion_ids), judged.scores, state))
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
    judge: Any = RecordingJudge(task.groups.judge)
    task.groups.judge = judge

    def trainer(stock: Stock) -> Any:
        args = kind.config_of(spec, stock.ctx, stock.warm, all_prompts)
        args.output_dir = str(stock.folder)
        args.shuffle_dataset = False
        if args.beta and stock.lora is None:  # TRL reads the reference from the policy's folder
            stock.model.config.name_or_path = reference_folder(stock)
        replayed = Replayed(judge.rollouts, spec.num_generations)
        return GRPOTrainer(
            model=stock.model,
            args=args,
            processing_class=stock.warm.tokenizer,
            train_dataset=replayed.dataset(),
            reward_funcs=[replayed.reward(number, name) for number, name in enumerate(functions)],
            rollout_func=replayed.rollout,
            peft_config=stock.lora,
        )

    return Sides(training, trainer, spec.steps_total)


class Replayed:
    """Recorded rollouts, for TRL's trainer: its data set, `rollout_func` and `reward_funcs`."""

    def __init__(self, rollouts: Sequence[Rollout], group_size: int) -> None:
        self._rollouts = rollouts
        self._group_size = group_size
        self._next = iter(rollouts)
        self._current = rollouts[0]

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
        self._current = next(self._next)
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
            # Both sides shuffle the completions by the next random numbers.
            torch.set_rng_state(self._current.random_numbers)
            return [None if math.isnan(score) else score for score in scores]

        recorded.__name__ = name
        return recorded
