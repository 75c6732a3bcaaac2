"""The tasks of an evaluation by name. Imports torch, by the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ..context import WarmModel
from ..engine.answer import Answer
from ..engine.request import Request
from ..rewards.scoring import scorer
from .generation import Generation
from .likelihood import MultipleChoice, Perplexity
from .options import CHOICE, PERPLEXITY, EvalSpec
from .questions import Question


class Task(Protocol):
    """The requests to the model for a question, and the record of its answer."""

    def requests(
        self, number: int, question: Question, is_canceled: Callable[[], bool]
    ) -> tuple[Any, list[Request]]:
        """Return the argument of `row`, and the requests of question `number`. Raises JobFailed."""

    def row(self, subject: Any, answers: list[Answer]) -> dict[str, Any]:
        """Return the row of a question: `prompt`, `answer` and `metrics`, the primary one first."""


@contextmanager
def task_of(
    spec: EvalSpec, warm: WarmModel, questions: Sequence[Question], folders: Sequence[str]
) -> Iterator[Task]:
    """Yield the task that a spec names. folders: where functions of users are imported from.

    Raises JobFailed for a model that cannot do it.
    """
    if spec.task == CHOICE:
        yield MultipleChoice(warm)
    elif spec.task == PERPLEXITY:
        yield Perplexity(warm)
    else:
        with scorer(spec, [question.problem for question in questions], folders) as score:
            yield Generation(spec, warm, score)
