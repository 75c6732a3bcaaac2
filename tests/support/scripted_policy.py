"""Episodes whose turns are given: a policy that writes them, and TRL's trainer with the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from engines import make
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from warmd.jobs.engine.dialogues import Turn
from warmd.jobs.engine.rollouts import Segment
from warmd.jobs.training.arguments import KEPT_ACTIVATIONS


def written(tokens: Any, text: str) -> list[int]:
    """The tokens of a turn, with the one that ends it."""
    return [*tokens(text)["input_ids"], tokens.eos_token_id]


class Script:
    """A policy that writes the given turns of each task, one after another."""

    def __init__(self, tokens: Any, turns: Sequence[Sequence[str]]) -> None:
        self._tokens = tokens
        self._turns = [list(of_task) for of_task in turns]
        self._ids: dict[Any, list[int]] = {}
        self._due: list[Any] = []

    @property
    def is_idle(self) -> bool:
        return not self._due

    def begin(self, key: Any, prompt: Sequence[int], *, capacity: int) -> None:
        self._ids[key] = list(prompt)

    def go_on(
        self, key: Any, numbers: Any, given: Sequence[int] = (), *, stop: Sequence[str] = ()
    ) -> int:
        self._ids[key] += given
        self._due.append(key)
        return 1

    def step(self) -> dict[Any, Turn]:
        found = {}
        for key in self._due:
            text = self._turns[key.task].pop(0)
            ids = written(self._tokens, text)
            found[key] = Turn(Segment(ids=ids), text, "stop", self._ids[key][-256:])
            self._ids[key] += ids
        self._due = []
        return found

    def given(self, ids: Sequence[int]) -> Segment:
        return Segment(ids=list(ids), is_given=True)

    def end(self, key: Any) -> None:
        del self._ids[key]


class StockRollouts:
    """Rollouts of TRL's trainer with given turns, in a class with tools.

    `rows`: of the tasks, which begin with different prompts.
    """

    def __init__(
        self,
        tokens: Any,
        rows: Sequence[dict[str, Any]],
        environment: type,
        folder: Path,
        *,
        most_turns: int,
        rewards: Sequence[Any] = (),
    ) -> None:
        self._tokens = tokens
        self._data = [{"prompt": [{"role": "user", "content": ""}], **row} for row in rows]
        most = 100_000
        trainer: Any = GRPOTrainer(
            model=make("Qwen2", vocab_size=len(tokens), max_position_embeddings=most),
            args=GRPOConfig(
                output_dir=str(folder),
                per_device_train_batch_size=len(rows),
                num_generations=2,
                max_completion_length=most,
                max_tool_calling_iterations=most_turns,
                report_to=[],
                bf16=False,
                **KEPT_ACTIVATIONS,
                use_cpu=True,
                beta=0.0,
            ),
            processing_class=tokens,
            train_dataset=Dataset.from_list(self._data),
            environment_factory=environment,
            reward_funcs=list(rewards),
        )
        trainer._generate_single_turn = self._write
        trainer.model.train()
        self._trainer = trainer
        self._left: list[list[str]] = []
        self._prompts: list[list[int]] = []

    def play(self, turns: Sequence[Sequence[str]]) -> dict[str, Any]:
        """What the trainer makes of a batch of all rows."""
        self._left, self._prompts = [list(of_task) for of_task in turns], []
        found: dict[str, Any] = self._trainer._generate_and_score_completions(self._data)
        return found

    def _write(
        self, prompt_ids: list[list[int]], *_: Any, **__: Any
    ) -> tuple[list[list[int]], None]:
        if not self._prompts:
            self._prompts = [list(ids) for ids in prompt_ids]
        found = []
        for ids in prompt_ids:
            task = next(n for n, one in enumerate(self._prompts) if ids[: len(one)] == one)
            found.append(written(self._tokens, self._left[task].pop(0)))
        return found, None
