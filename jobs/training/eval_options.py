"""The options of training kinds that evaluate their model on held-out data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..errors import SpecError
from ..spec import option
from .options import MOST_ROWS, MOST_STEPS, TrainingSpec


@dataclass(frozen=True, kw_only=True)
class EvaluatedSpec(TrainingSpec):
    """The held-out data on which a model is evaluated, and the interval."""

    changeable: ClassVar[tuple[str, ...]] = (*TrainingSpec.changeable, "eval_every")

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

    def check(self) -> None:
        super().check()
        for name in ("eval_every", "keep_best"):
            value = getattr(self, name)
            is_of_eval = name == "eval_every" or str(value).startswith("eval_")
            if value and is_of_eval and not self.is_measured:
                raise SpecError(name, "must go with eval_samples or eval_dataset, got it alone")
