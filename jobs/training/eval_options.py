"""The options of training kinds that evaluate their model on held-out data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..relations import ABOVE_0, GIVEN, Condition, Relation, goes_with
from ..spec import option
from .options import MOST_ROWS, MOST_STEPS, TrainingSpec

_OF_EVAL = Condition("eval_…", lambda metric: str(metric).startswith("eval_"))


@dataclass(frozen=True, kw_only=True)
class EvaluatedSpec(TrainingSpec):
    """The held-out data on which a model is evaluated, and the interval."""

    changeable: ClassVar[tuple[str, ...]] = (*TrainingSpec.changeable, "eval_every")

    relations: ClassVar[tuple[Relation, ...]] = (
        goes_with("eval_every", eval_samples=ABOVE_0, eval_dataset=GIVEN),
        goes_with("keep_best", when=_OF_EVAL, eval_samples=ABOVE_0, eval_dataset=GIVEN),
    )

    eval_dataset: str | None = option(
        None,
        "data set of held-out records",
        group="evaluation",
        default_text="the records of dataset after those trained on",
    )
    eval_samples: int | None = option(
        None,
        "number of held-out records to measure on",
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
    def is_measured(self) -> bool:
        """Whether there are held-out records."""
        return self.eval_dataset is not None or bool(self.eval_samples)
