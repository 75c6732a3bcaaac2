"""The options of the DPO kind, and their checks at submit. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..data.options import Content
from ..files.jsonl import Place
from ..relations import ABOVE_0, Relation, goes_with, is_in, never_with
from ..spec import HttpMethod, option, override
from ..training.options import TrainingSpec
from ..training.row_options import RowTrainingSpec
from .dataset import Source

# TRL's losses that follow from the log-probabilities of both completions, by policy and reference.
LOSSES = (
    *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
    *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm"),
)
SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")  # the losses that smooth labels
EXO_SMOOTHING = 1e-3  # recommended by the EXO paper; the loss is infinite at 0

# The metrics of a step, and of an evaluation, by their names in TRL.
REWARDS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


@dataclass(frozen=True, kw_only=True)
class DpoSpec(RowTrainingSpec):
    """Train a causal language model by DPO: prompts with a chosen and a rejected completion."""

    kind: ClassVar[str] = "dpo"
    http: ClassVar[HttpMethod | None] = HttpMethod(
        type="dpo",
        training_file="dataset",
        validation_file="eval_dataset",
        harmless_text=("system", "columns"),
        renamed={"n_epochs": "epochs"},
    )
    judged_by: ClassVar[tuple[str, ...]] = (
        *("loss", "eval_loss", *REWARDS, *(f"eval_{name}" for name in REWARDS)),
    )
    lower_is_better: ClassVar[tuple[str, ...]] = (
        *("loss", "eval_loss", "rewards/rejected", "eval_rewards/rejected"),
    )

    relations: ClassVar[tuple[Relation, ...]] = (
        goes_with("label_smoothing", when=ABOVE_0, loss_type=SMOOTHED),
        never_with("label_smoothing", when=is_in(0), loss_type="exo_pair"),
    )

    dataset: str | None = override(
        RowTrainingSpec,
        "dataset",
        help="JSONL, CSV or Parquet file, folder of them or hub data set "
        "(owner/name:config:split) of prompt/chosen/rejected records, or of OpenAI's preference "
        "records",
    )
    max_length: int | None = override(
        RowTrainingSpec,
        "max_length",
        help="maximum length in tokens of a prompt with one of its completions; longer ones are "
        "cut at the end",
    )

    learning_rate: float | None = override(
        TrainingSpec,
        "learning_rate",
        default_text="by model size: 1e-4 below 1M parameters, 1e-5 below 100M, else 1e-6; with "
        "lora, ten times that",
    )
    loss_type: str = option(
        "sigmoid", "loss formula, by its name in TRL", group="optimization", choices=LOSSES
    )
    beta: float = option(
        0.1,
        "beta of the loss (tau with ipo); larger values keep the model closer to the initial "
        "weights",
        group="optimization",
        above=0,
        maximum=1000,
    )
    label_smoothing: float | None = option(
        None,
        "assumed probability that a label is wrong",
        group="optimization",
        default_text=f"0, or {EXO_SMOOTHING:g} for exo_pair",
        minimum=0,
        maximum=0.499,
    )

    eval_samples: int | None = override(
        RowTrainingSpec,
        "eval_samples",
        help="number of held-out records to measure loss and rewards on",
    )

    @property
    def smoothing(self) -> float:
        """The label smoothing of the loss."""
        if self.label_smoothing is None:
            return EXO_SMOOTHING if self.loss_type == "exo_pair" else 0.0
        return self.label_smoothing

    @property
    def source(self) -> Source:
        """Where the pairs come from."""
        return Source(**self.source_options())

    @property
    def most_processes(self) -> int:
        return self.batch_size  # a loss is a mean over the pairs of a micro-batch

    def content_of(self, values: Mapping[str, Any], place: Place) -> Content:
        # Only the longer side is counted.
        return max(self.prompt_of(values, place)[1], key=lambda side: len(str(side)))

    def prompt_of(
        self, values: Mapping[str, Any], place: Place
    ) -> tuple[Content, Sequence[Content]]:
        pair = self.source.row(values, place)
        return pair.opening, pair.sides
