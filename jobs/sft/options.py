"""The options of the SFT kind, and what is checked of them at submit. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from ..errors import SpecError
from ..models.architectures import check_generates
from ..models.chat_templates import NO_TEMPLATE
from ..models.tokenizer_folder import TokenizerFolder
from ..spec import option, override, path_of
from ..training.options import (
    DEFAULT_TEMPLATE,
    MOST_CHARACTERS,
    MOST_ROWS,
    MOST_STEPS,
    MOST_TOKENS,
    TrainingSpec,
)
from .dataset import Rows, Source

MAX_LENGTH = 1024  # tokens of a row, unless the options or the model's positions say otherwise


@dataclass(frozen=True, kw_only=True)
class SftSpec(TrainingSpec):
    """Fine-tune a decoder on prompts with completions, chats or texts (supervised)."""

    kind: ClassVar[str] = "sft"
    argument: ClassVar[str | None] = "dataset"
    changeable: ClassVar[tuple[str, ...]] = (*TrainingSpec.changeable, "eval_every")
    judged_by: ClassVar[tuple[str, ...]] = (
        *("loss", "eval_loss", "mean_token_accuracy", "eval_mean_token_accuracy"),
    )
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "eval_loss")

    dataset: str | None = option(
        None,
        "JSONL file of prompt/completion, messages, question/answer or text records",
        group="data",
        default_text="none: it must be given",
    )
    samples: int | None = option(
        None,
        "number of training records, from the top of the dataset",
        group="data",
        default_text="all but those held out",
        minimum=1,
        maximum=MOST_ROWS,
    )
    max_length: int | None = option(
        None,
        "maximum record length in tokens; longer records are cut at the end",
        group="data",
        default_text=f"{MAX_LENGTH}, or the positions of the model where they are fewer",
        minimum=2,
        maximum=MOST_TOKENS,
    )
    completion_only_loss: bool = option(
        True, "loss on completions only, not on their prompts", group="data"
    )
    assistant_only_loss: bool = option(
        False,
        "loss on assistant turns only, as the chat template marks them; otherwise on the whole "
        "chat, or on the completion",
        group="data",
    )
    skip_bad_rows: bool = option(
        False, "skip and count unusable records instead of refusing the job", group="data"
    )
    chat_template: bool = option(
        False, "chat template of the tokenizer, applied to plain prompts", group="data"
    )
    system: str | None = option(None, "system message at the start of a chat", group="data")
    template: str = option(
        DEFAULT_TEMPLATE,
        "prompt template with {question}, for question/answer records; the answer follows after "
        "a space",
        group="data",
    )

    model: str = option("demo", "warm model to train", group="model")

    learning_rate: float | None = override(
        TrainingSpec,
        "learning_rate",
        default_text="by model size: 1e-3 below 1M parameters, 3e-4 below 100M, else 2e-5",
    )
    epochs: int = option(
        1, "passes over the training records", group="optimization", minimum=1, maximum=10**6
    )
    steps: int | None = override(
        TrainingSpec, "steps", default_text="epochs over the training records"
    )
    batch_size: int = override(TrainingSpec, "batch_size", default=8)
    gradient_accumulation: int = override(TrainingSpec, "gradient_accumulation", default=1)
    warmup_steps: int = override(TrainingSpec, "warmup_steps", default=0)

    eval_dataset: str | None = option(
        None,
        "JSONL file of held-out records",
        group="evaluation",
        default_text="the records of dataset after those trained on",
    )
    eval_samples: int | None = option(
        None,
        "number of held-out records to measure loss and token accuracy on",
        group="evaluation",
        default_text="all of eval_dataset, otherwise 0",
        minimum=0,
        maximum=MOST_ROWS,
    )
    eval_every: int = option(
        0,
        "steps between evaluations (0: only before the first and after the last step)",
        group="evaluation",
        minimum=0,
        maximum=MOST_STEPS,
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
