"""The options of the SFT kind, and what is checked of them at submit. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from ..errors import SpecError
from ..models.architectures import check_generates
from ..models.tokenizer_folder import TokenizerFolder
from ..spec import option, path_of
from ..training.options import (
    MOST_AT_ONCE,
    MOST_ROWS,
    MOST_STEPS,
    MOST_TOKENS,
    TrainingSpec,
)
from .dataset import DEFAULT_TEMPLATE, NO_TEMPLATE, Rows, Source

MAX_LENGTH = 1024  # tokens of a row, unless the options or the model's positions say otherwise
MOST_CHARACTERS = 100_000  # of template and system message


@dataclass(frozen=True, kw_only=True)
class SftSpec(TrainingSpec):
    """Every option of an SFT job."""

    kind: ClassVar[str] = "sft"
    argument: ClassVar[str | None] = "dataset"
    changeable: ClassVar[tuple[str, ...]] = (*TrainingSpec.changeable, "eval_every")
    judged_by: ClassVar[tuple[str, ...]] = (
        *("loss", "eval_loss", "mean_token_accuracy", "eval_mean_token_accuracy"),
    )
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "eval_loss")

    model: str = option("demo", "name of the warm model to train")
    dataset: str | None = option(
        None, "JSONL file of prompt/completion, messages, question/answer or text rows"
    )
    eval_dataset: str | None = option(
        None, "JSONL file of held-out rows (default: rows of dataset after those trained on)"
    )
    samples: int | None = option(
        None,
        "rows to train on, from the top (default: all but those held out)",
        minimum=1,
        maximum=MOST_ROWS,
    )
    eval_samples: int | None = option(
        None,
        "held-out rows to measure loss and token accuracy on (default: all of eval_dataset, or 0)",
        minimum=0,
        maximum=MOST_ROWS,
    )
    skip_bad_rows: bool = option(False, "skip and count rows that cannot be learned from")
    template: str = option(
        DEFAULT_TEMPLATE,
        "prompt text of question/answer rows, with {question}; the answer follows after a space",
    )
    chat_template: bool = option(
        False, "put plain prompts and completions into the tokenizer's chat template"
    )
    system: str | None = option(None, "system message that opens a chat")
    completion_only_loss: bool = option(
        True, "loss on completions alone (false: on their prompts, too)"
    )
    assistant_only_loss: bool = option(
        False,
        "chats: loss on what the assistant says, as the chat template marks it (false: on the "
        "whole chat, or on the completion)",
    )
    max_length: int | None = option(
        None,
        f"tokens of a row, cut at the end (default: {MAX_LENGTH}, or what the model takes)",
        minimum=2,
        maximum=MOST_TOKENS,
    )

    epochs: int = option(1, "passes over the rows", minimum=1, maximum=10**6)
    steps: int | None = option(
        None, "optimizer steps in all, instead of epochs", minimum=1, maximum=MOST_STEPS
    )
    batch_size: int = option(8, "rows per micro-step", minimum=1, maximum=MOST_AT_ONCE)
    gradient_accumulation: int = option(1, "micro-steps per step", minimum=1, maximum=MOST_AT_ONCE)

    learning_rate: float | None = option(
        None,
        "AdamW learning rate (default: by model size, 1e-3 below 1M parameters, 3e-4 below 100M, "
        "else 2e-5)",
        above=0,
        maximum=1,
    )
    warmup_steps: int = option(
        0, "steps in which the learning rate rises", minimum=0, maximum=MOST_STEPS
    )
    weight_decay: float = option(0.0, "AdamW weight decay", minimum=0, maximum=10)
    eval_every: int = option(
        0,
        "steps between evaluations (0: before the first and after the last step alone)",
        minimum=0,
        maximum=MOST_STEPS,
    )
    seed: int = option(
        42, "random seed of the rows' order and of dropout", minimum=0, maximum=2**32 - 1
    )

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step."""
        return self.batch_size * self.gradient_accumulation

    @property
    def steps_total(self) -> int:
        """The optimizer steps of the whole job; the last step of an epoch may have fewer rows.

        `samples` must be known: `located` counts the rows of the file.
        """
        if self.steps is not None:
            return self.steps
        if self.samples is None:
            raise SpecError("samples", "must be given, or else steps, got neither")
        return self.epochs * -(-self.samples // self.rows_per_step)

    @property
    def is_measured(self) -> bool:
        """Whether there are held-out rows."""
        return self.eval_dataset is not None or bool(self.eval_samples)

    @property
    def source(self) -> Source:
        """Where the rows come from."""
        is_apart = self.eval_dataset is not None
        return Source(
            dataset=self.dataset or "",
            eval_dataset=self.eval_dataset,
            samples=self.samples,
            eval_samples=self.eval_samples if is_apart else self.eval_samples or 0,
            template=self.template,
            chat_template=self.chat_template,
            system=self.system,
            assistant_only_loss=self.assistant_only_loss,
            skip_bad_rows=self.skip_bad_rows,
        )

    def load(self) -> Rows:
        """Read the rows to train on and those held out. Raises SpecError."""
        return self.source.load()

    def check(self) -> None:
        super().check()
        if not self.dataset:
            raise SpecError("dataset", "must be given: a JSONL file")
        if "{question}" not in self.template:
            raise SpecError("template", f"must contain {{question}}, got {self.template[:60]!r}")
        for name in ("template", "system"):
            length = len(getattr(self, name) or "")
            if length > MOST_CHARACTERS:
                raise SpecError(name, f"must be at most {MOST_CHARACTERS} characters, got {length}")
        if self.eval_dataset is not None and self.eval_samples == 0:
            raise SpecError("eval_samples", "must be at least 1 with eval_dataset, got 0")
        for name in ("eval_every", "keep_best"):
            value = getattr(self, name)
            is_of_eval = name == "eval_every" or str(value).startswith("eval_")
            if value and is_of_eval and not self.is_measured:
                raise SpecError(name, "must go with eval_samples or eval_dataset, got it alone")

    def located(self, folder: Path) -> Self:
        """Return the same spec with paths seen from `folder` made absolute, and `samples` known.

        Raises SpecError.
        """
        changes: dict[str, Any] = {
            name: str(path_of(name, getattr(self, name), folder))
            for name in ("dataset", "eval_dataset")
            if getattr(self, name) is not None
        }
        located = replace(self, **changes)
        if located.samples is None:  # a file that grows later must not change what the job is
            located = replace(located, samples=len(located.load().train))
        return located

    def extended(self, steps: int) -> Self:
        """Return the same spec with another number of steps in all. Raises SpecError."""
        steps = self.options()["steps"].convert(steps)
        return self if steps == self.steps_total else replace(self, steps=steps)

    def check_inputs(self, model_config: Mapping[str, Any] | None) -> None:
        """Check what needs files: rows, trackers, lengths. Raises SpecError.

        `model_config` is the content of the model's config.json, None when it is not at hand.
        """
        super().check_inputs(model_config)
        config = model_config or {}
        check_generates(config)
        self.load()
        limit = config.get("text_config", config).get("max_position_embeddings")
        if None not in (limit, self.max_length) and int(str(self.max_length)) > int(str(limit)):
            raise SpecError(
                "max_length",
                f"must be at most {limit} (the positions of {self.model}), got {self.max_length}",
            )

    def check_model_files(self, folder: Path) -> None:
        """Check that there is a chat template where a chat needs one. Raises SpecError."""
        rows = self.load()
        is_chat = any(row.is_chat for row in [*rows.train, *rows.held_out])
        if is_chat and TokenizerFolder(folder).lacks_chat_template():
            raise SpecError(*NO_TEMPLATE)
