"""The options of the SFT kind, and their checks at submit. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..data import templates
from ..data.options import MOST_CHARACTERS, Content
from ..data.templates import AS_IT_IS
from ..errors import SpecError
from ..files.jsonl import Place
from ..models.chat_templates import ChatTemplate, check_used
from ..spec import HttpMethod, option, override
from ..training.options import TrainingSpec
from ..training.row_options import RowTrainingSpec
from .dataset import ZERO_WEIGHT, Source
from .training_templates import NOT_MARKED, marks_assistant


@dataclass(frozen=True, kw_only=True)
class SftSpec(RowTrainingSpec):
    """Fine-tune a causal language model (SFT) on prompts with completions, chats or texts."""

    kind: ClassVar[str] = "sft"
    http: ClassVar[HttpMethod | None] = HttpMethod(
        type="supervised",
        training_file="dataset",
        validation_file="eval_dataset",
        harmless_text=("template", "system", "columns"),
        renamed={"n_epochs": "epochs"},
    )
    judged_by: ClassVar[tuple[str, ...]] = (
        *("loss", "eval_loss", "mean_token_accuracy", "eval_mean_token_accuracy"),
    )
    lower_is_better: ClassVar[tuple[str, ...]] = ("loss", "eval_loss")

    dataset: str | None = override(
        RowTrainingSpec,
        "dataset",
        help="JSONL, CSV or Parquet file, folder of them or hub data set "
        "(owner/name:config:split) of prompt/completion, messages, question/answer or text records",
    )
    samples: int | None = override(RowTrainingSpec, "samples")
    max_length: int | None = override(RowTrainingSpec, "max_length")
    completion_only_loss: bool = option(
        True, "loss on completions only, not on their prompts", group="data"
    )
    assistant_only_loss: bool = option(
        False,
        "loss on assistant messages only, which the chat template must mark; otherwise on the "
        "whole chat, or on the completion",
        group="data",
    )
    template: str = option(
        AS_IT_IS,
        f"prompt template of question/answer records: {templates.HELP}; a space and the answer "
        "follow it",
        group="data",
        longest=MOST_CHARACTERS,
        names=templates.NAMED,
    )

    learning_rate: float | None = override(
        TrainingSpec,
        "learning_rate",
        default_text="by model size: 1e-3 below 1M parameters, 3e-4 below 100M, else 2e-5; with "
        "lora, ten times that",
    )

    eval_samples: int | None = override(
        RowTrainingSpec,
        "eval_samples",
        help="number of held-out records to measure loss and token accuracy on",
    )

    @classmethod
    def of_stored(cls, options: Mapping[str, Any]) -> dict[str, Any]:
        return {"template": templates.MATH, **options}

    @property
    def source(self) -> Source:
        """Where the rows come from."""
        return Source(
            **self.source_options(),
            template=self.template,
            assistant_only_loss=self.assistant_only_loss,
        )

    def content_of(self, values: Mapping[str, Any], place: Place) -> Content:
        return self.source.row(values, place).whole

    def prompt_of(
        self, values: Mapping[str, Any], place: Place
    ) -> tuple[Content, Sequence[Content]] | None:
        row = self.source.row(values, place)
        return None if row.prompt is None else (row.opening, [row.whole])

    def check_template(self, template: ChatTemplate) -> None:
        zero_weight = None  # the first row that has it
        for parts, place in self.rows.parts.items():
            check_used(template, parts - {ZERO_WEIGHT}, "dataset", place)
            if zero_weight is None and ZERO_WEIGHT in parts:
                zero_weight = place
        if marks_assistant(template.source):
            return
        if self.assistant_only_loss:
            raise SpecError("assistant_only_loss", f"must be false {NOT_MARKED}")
        if zero_weight is not None:
            raise SpecError("dataset", f"{zero_weight}: weight must be 1 {NOT_MARKED}")

    def check(self) -> None:
        super().check()
        templates.check(self.template)
