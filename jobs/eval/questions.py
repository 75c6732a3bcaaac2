"""The questions of an evaluation, read from a data set. Imports no torch.

The identity of a question is a digest of its content as the data set has it: it does not depend on
the template, the examples or the model, so that evaluations are compared question by question.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import islice
from typing import Any

import orjson

from ..data import templates, texts
from ..data.reader import Reader, Reading
from ..data.sources import TAKES
from ..data.templates import AS_IT_IS
from ..errors import SpecError
from ..files import jsonl
from ..files.chats import refuse_inputs
from ..files.jsonl import Place
from ..rewards.problems import ARITHMETIC, Problem, iter_arithmetic, problem_of

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True)
class Question:
    """A question: its problem with the final prompt, and the source of its answer."""

    problem: Problem
    identity: str  # sha256, in hex
    choices: tuple[str, ...] = ()  # of multiple choice
    right_choice: int = -1  # index in choices


def with_prompt(question: Question, prompt: str) -> Question:
    """Return a question with another prompt."""
    return replace(question, problem=replace(question.problem, prompt=prompt))


def digest(questions: Iterable[Question]) -> str:
    """Return the content digest of questions in their order: sha256 in hex."""
    found = sha256()
    for question in questions:
        found.update(bytes.fromhex(question.identity))
    return found.hexdigest()


def digests(questions: Iterable[Question]) -> Iterator[str]:
    """Yield the digest of the first question, of the first two, and so on."""
    found = sha256()
    for question in questions:
        found.update(bytes.fromhex(question.identity))
        yield found.hexdigest()


def open_ended(
    source: str,
    template: str,
    reading: Reading,
    *,
    check: Callable[[Problem], None],
    named_by: str = "dataset",
) -> Iterator[Question]:
    """Yield questions to complete: records of `prompt`, `question` or `messages`; or sums.

    Raises SpecError.
    """
    if source == ARITHMETIC:
        for problem in iter_arithmetic("eval"):
            yield Question(problem, _identity(problem.prompt, problem.answer))
        return

    def convert(values: Mapping[str, Any], place: Place) -> Question:
        raw = problem_of(AS_IT_IS, values, place)
        check(raw)
        problem = problem_of(template, values, place) if templates.changes(template) else raw
        inputs = [raw.inputs.content] if raw.inputs else []
        return Question(problem, _identity(raw.prompt, raw.answer, *inputs))

    yield from Reader(convert, reading).rows(named_by, source, f"{TAKES} or {ARITHMETIC}")


def multiple_choice(source: str, template: str, reading: Reading) -> Iterator[Question]:
    """Yield questions with choices.

    A record has a `question` or `prompt`, `choices` (a list of at least two texts) and an `answer`:
    the index of the right choice, its letter, or its text. Raises SpecError.
    """

    def convert(values: Mapping[str, Any], place: Place) -> Question:
        choices = _choices(values, place)
        right = _right_choice(values.get("answer"), choices, place.field("answer"))
        rest = {name: value for name, value in values.items() if name != "answer"}
        raw = problem_of(AS_IT_IS, rest, place)
        refuse_inputs(raw.inputs, place)
        if not isinstance(raw.prompt, str):
            raise place.field("prompt").fault("text", "chat messages")
        problem = replace(problem_of(template, rest, place), answer=choices[right])
        return Question(problem, _identity(raw.prompt, right, choices), tuple(choices), right)

    return Reader(convert, reading).rows("dataset", source)


def _choices(values: Mapping[str, Any], place: Place) -> list[str]:
    if "choices" not in values:
        raise place.fault("an object with choices", jsonl.keys_of(dict(values)))
    found = values["choices"]
    there = place.field("choices")
    if not isinstance(found, list) or not 2 <= len(found) <= len(_LETTERS):
        got = f"{len(found)}" if isinstance(found, list) else jsonl.kind_of(found)
        raise there.fault(f"a list of 2 to {len(_LETTERS)} texts", got)
    return [jsonl.text(text, there.item(index)) for index, text in enumerate(found)]


def _right_choice(value: Any, choices: list[str], place: Place) -> int:
    if jsonl.is_text(value) and value in choices:
        return choices.index(value)
    if isinstance(value, str) and len(value) == 1 and value.upper() in _LETTERS[: len(choices)]:
        return _LETTERS.index(value.upper())
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < len(choices):
        return value
    got = repr(value)[:60] if isinstance(value, str | int) else jsonl.kind_of(value)
    raise place.fault(f"an index below {len(choices)}, a letter or the text of a choice", got)


def documents(source: str, reading: Reading) -> Iterator[Question]:
    """Yield texts whose perplexity is measured: the paragraphs of a text file, or its records.

    Raises SpecError.
    """
    for row, text in enumerate(texts.read("dataset", source, reading), start=1):
        yield Question(Problem(text, None, row), _identity(text))


def of_tasks(environment: str, tasks: Iterable[Problem]) -> Iterator[Question]:
    """Yield the tasks of an environment or agent as questions."""
    for task in tasks:
        yield Question(task, _identity(environment, task.row, dict(task.columns)))


def taken(questions: Iterator[Question], samples: int | None, source: str) -> list[Question]:
    """Return the first `samples` questions; None: all. Raises SpecError when there are fewer."""
    found = list(islice(questions, samples))
    if samples is not None and len(found) < samples:
        raise SpecError(
            "samples", f"must be at most {len(found)} (the records of {source}), got {samples}"
        )
    if not found:
        raise SpecError("dataset", f"must have records, got {source} without a usable one")
    return found


def _identity(*parts: Any) -> str:
    return sha256(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS)).hexdigest()
