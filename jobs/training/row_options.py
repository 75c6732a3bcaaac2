"""The options of the kinds that train on rows of a data set (SFT, DPO). Imports no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from ..data.options import ChatRecordsSpec, Content
from ..data.sources import TAKES, located
from ..errors import SpecError
from ..models.architectures import check_generates, positions_in
from ..models.chat_templates import NO_TEMPLATE, ChatTemplate, check_used
from ..models.tokenizer_folder import TokenizerFolder
from ..relations import GIVEN, Relation, is_in, never_with
from ..spec import option, override
from .eval_options import EvaluatedSpec
from .lengths import MAX_LENGTH, row_length
from .options import MOST_ROWS, MOST_TOKENS, TrainingSpec
from .rows import Rows, RowSource


@dataclass(frozen=True, kw_only=True)
class RowTrainingSpec(ChatRecordsSpec, EvaluatedSpec):
    """Train a decoder on rows of a data set, and evaluate it on held-out rows."""

    argument: ClassVar[str | None] = "dataset"

    relations: ClassVar[tuple[Relation, ...]] = (
        never_with("eval_samples", when=is_in(0), eval_dataset=GIVEN),
        never_with("epochs", time_limit=GIVEN),
    )

    dataset: str | None = option(
        None, "data set", group="data", default_text="none: it must be given"
    )
    samples: int | None = option(
        None,
        "number of training records, from the start of the dataset; all: every record that is not "
        "held out",
        group="data",
        default_text="all",
        minimum=1,
        maximum=MOST_ROWS,
        none_word="all",
    )
    max_length: int | None = option(
        None,
        "maximum record length in tokens; longer records are cut at the end",
        group="data",
        default_text=f"{MAX_LENGTH}, or the positions of the model where they are fewer",
        minimum=2,
        maximum=MOST_TOKENS,
    )

    model: str = option("demo", "warm model to train", group="model")

    epochs: int = option(
        1, "passes over the training records", group="optimization", minimum=1, maximum=10**6
    )
    steps: int | None = override(
        TrainingSpec, "steps", default_text="epochs over the training records"
    )
    batch_size: int = override(TrainingSpec, "batch_size", default=8)
    gradient_accumulation: int = override(TrainingSpec, "gradient_accumulation", default=1)
    warmup_steps: int = override(TrainingSpec, "warmup_steps", default=0)

    @property
    @abstractmethod
    def source(self) -> RowSource[Any]:
        """Where the rows come from."""

    @cached_property
    def rows(self) -> Rows[Any]:
        """The rows to train on and those held out, read and checked. Raises SpecError."""
        return self.source.load()

    def first_prompt(self) -> Content:
        source = self.source
        content: Content = next(source.rows("dataset", source.dataset, source.reading())).opening
        return content

    def cut_at(self, positions: int | None) -> int:
        return row_length(self.max_length, positions)

    @property
    def rows_per_step(self) -> int:
        """Rows of one optimizer step."""
        return self.batch_size * self.gradient_accumulation

    @property
    def steps_total(self) -> int | None:
        """The most optimizer steps of the whole job: `epochs` take fewer if rows are dropped.

        `samples` must be known: `located` counts the rows of the file.
        """
        if self.time_limit is not None:
            return None
        if self.steps is not None:
            return self.steps
        if self.samples is None:
            raise SpecError("samples", "must be given, or else steps, got neither")
        return self.steps_for(self.samples)

    def steps_for(self, rows: int) -> int:
        """Return the optimizer steps on this many rows; an epoch's last may have fewer of them."""
        return self.epochs * -(-rows // self.rows_per_step) if self.steps is None else self.steps

    @property
    def most_processes(self) -> int:
        return self.rows_per_step

    def source_options(self) -> dict[str, Any]:
        """Return the fields of a RowSource that these options set."""
        is_apart = self.eval_dataset is not None
        return {
            "dataset": self.dataset or "",
            "eval_dataset": self.eval_dataset,
            "samples": self.samples,
            "eval_samples": self.eval_samples if is_apart else self.eval_samples or 0,
            "chat_template": self.chat_template,
            "system": self.system,
            "skip_bad_rows": self.skip_bad_rows,
            "columns": self.column_names,
        }

    def check(self) -> None:
        super().check()
        if not self.dataset:
            raise SpecError("dataset", f"must be given: {TAKES}")

    def located(self, folder: Path) -> Self:
        """Return the spec with data sets, seen from `folder`, by absolute path, `samples` known.

        Raises SpecError.
        """
        changes: dict[str, Any] = {
            name: located(name, getattr(self, name), folder)
            for name in ("dataset", "eval_dataset")
            if getattr(self, name) is not None
        }
        spec = replace(self, **changes)
        if spec.samples is None:  # a file that grows later must not change the job
            spec = replace(spec, samples=len(spec.rows.train))
        return spec

    def extended(self, steps: int) -> Self:
        """Return the spec with another total number of steps. Raises SpecError."""
        steps = self.options()["steps"].convert(steps)
        return replace(self, steps=steps)

    def check_inputs(self, model_config: Mapping[str, Any] | None) -> None:
        """Check everything that needs files: rows, trackers, lengths. Raises SpecError.

        `model_config` is the content of the model's config.json, None if it is not available.
        """
        super().check_inputs(model_config)
        config = model_config or {}
        check_generates(config)
        rows = self.rows
        for name in ("system", "chat_template"):
            if getattr(self, name) and not rows.has_chats:
                raise SpecError(name, "must go with prompts or chats, got only texts")
        limit = positions_in(config)
        if limit is not None and (self.max_length or 0) > limit:
            raise SpecError(
                "max_length",
                f"must be at most {limit} (the positions of {self.model}), got {self.max_length}",
            )

    def check_chats(self, folder: Path) -> None:
        if not self.rows.has_chats:
            return
        files = TokenizerFolder(folder)
        if files.lacks_chat_template():
            raise SpecError(*NO_TEMPLATE)
        if (template := files.chat_template()) is not None:
            self.check_template(template)

    def check_template(self, template: ChatTemplate) -> None:
        """Check that the template uses all parts of the rows. Raises SpecError."""
        for parts, place in self.rows.parts.items():
            check_used(template, parts, "dataset", place)
