"""Graders by the names and fields of OpenAI's API: string_check, text_similarity, multi, python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from ..errors import JobFailed, SpecError
from ..user_code import tracebacks
from ..user_code.modules import load
from .formula import Formula
from .similarity import METRICS, REFUSED
from .template import Template

OPTION = "grader"
MOST_BYTES = 100_000
MOST_FILLED = 1_000_000  # characters of a template that is filled in
TYPES = ("string_check", "text_similarity", "multi", "python")
_OPERATIONS: dict[str, Callable[[str, str], bool]] = {
    "eq": lambda text, reference: text == reference,
    "ne": lambda text, reference: text != reference,
    "like": lambda text, reference: reference in text,
    "ilike": lambda text, reference: reference.lower() in text.lower(),
}


@dataclass(frozen=True)
class Grader:
    """A grader that has been read: it scores a completion (`output`) by its record (`item`)."""

    score: Callable[[str, Mapping[str, Any]], float]
    columns: Sequence[str] = ()  # of the data that it needs
    functions: Sequence[str] = ()  # module:function, of python graders
    parts: Mapping[str, Grader] = field(default_factory=dict)  # of a multi grader, by name


def read(text: str, *, most: int = MOST_FILLED) -> Grader:
    """Read a grader from JSON, without importing anything. Raises SpecError.

    `most`: characters of a template that is filled in; scores of longer ones raise SpecError.
    """
    if len(text.encode()) > MOST_BYTES:
        raise SpecError(OPTION, f"must be at most {MOST_BYTES} bytes, got {len(text.encode())}")
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise SpecError(OPTION, f"must be JSON, got {text[:60]!r}: {error.msg}") from None
    return _read(values, "the grader", most)


def _read(values: Any, field: str, most: int) -> Grader:
    kind = values.get("type") if isinstance(values, dict) else None
    if not isinstance(kind, str) or kind not in _READERS:
        got = repr(kind)[:80]
        raise SpecError(OPTION, f"type of {field} must be one of {', '.join(TYPES)}, got {got}")
    reader, fields = _READERS[kind]
    for name in fields:
        if name not in values:
            raise SpecError(
                OPTION, f"{field} ({kind}) must have {', '.join(fields)}, got no {name}"
            )
    for name in values:
        if name not in {"type", "name", *fields}:
            raise SpecError(OPTION, f"{field} ({kind}): {name[:80]} is unknown or not supported")
    return reader(values, field, most)


def _string_check(values: Mapping[str, Any], field: str, most: int) -> Grader:
    operation = values["operation"]
    if not isinstance(operation, str) or operation not in _OPERATIONS:
        takes = f"operation of {field} must be one of {', '.join(_OPERATIONS)}"
        raise SpecError(OPTION, f"{takes}, got {str(operation)[:80]!r}")
    return _compared(values, field, most, _OPERATIONS[operation])


def _text_similarity(values: Mapping[str, Any], field: str, most: int) -> Grader:
    metric = str(values["evaluation_metric"])
    if metric not in METRICS:
        why = f", which needs {REFUSED[metric]}" if metric in REFUSED else ""
        takes = f"evaluation_metric of {field} must be one of {', '.join(METRICS)}"
        raise SpecError(OPTION, f"{takes}, got {metric[:80]!r}{why}")
    return _compared(values, field, most, METRICS[metric])


def _compared(
    values: Mapping[str, Any], field: str, most: int, compare: Callable[[str, str], float]
) -> Grader:
    text = Template(OPTION, f"input of {field}", values["input"], most)
    reference = Template(OPTION, f"reference of {field}", values["reference"], most)

    def score(output: str, item: Mapping[str, Any]) -> float:
        return float(compare(text.fill(output, item), reference.fill(output, item)))

    return Grader(score, [*text.columns, *reference.columns])


def _multi(values: Mapping[str, Any], field: str, most: int) -> Grader:
    parts = values["graders"]
    if not isinstance(parts, dict) or not parts:
        raise SpecError(OPTION, f"graders of {field} must be an object of graders by name")
    for name, part in parts.items():
        if not name.isidentifier():
            raise SpecError(OPTION, f"graders of {field} must have plain names, got {name[:80]!r}")
        if isinstance(part, dict) and part.get("type") == "multi":
            raise SpecError(OPTION, f"graders of {field} must not be multi, got {name[:80]}")
    read = {name: _read(part, name, most) for name, part in parts.items()}
    formula = Formula(OPTION, f"calculate_output of {field}", values["calculate_output"], read)

    def score(output: str, item: Mapping[str, Any]) -> float:
        return formula({name: part.score(output, item) for name, part in read.items()})

    return Grader(
        score,
        [column for part in read.values() for column in part.columns],
        [function for part in read.values() for function in part.functions],
        read,
    )


def _python(values: Mapping[str, Any], field: str, _: int) -> Grader:
    source = values["source"]
    module, colon, function = source.partition(":") if isinstance(source, str) else ("", "", "")
    if not (colon and all(part.isidentifier() for part in (*module.split("."), function))):
        raise SpecError(
            OPTION,
            f"source of {field} must be module:function of this machine, got other text",
        )

    def score(output: str, item: Mapping[str, Any]) -> float:
        found = _imported(source)
        try:
            return float(found({"output_text": output}, dict(item)))
        except Exception as error:
            raise JobFailed(f"grader {source} failed: {tracebacks.reason(error)}") from error

    return Grader(score, (), [source])


def _imported(source: str) -> Callable[..., Any]:
    """Import `module:function`. Raises SpecError."""
    name, _, function = source.partition(":")
    try:
        found = getattr(load(name), function, None)
    except (Exception, SystemExit) as error:
        raise SpecError(OPTION, f"{source} must import, got {tracebacks.reason(error)}") from error
    if not callable(found):
        raise SpecError(OPTION, f"{source} must be a function, got a {type(found).__name__}")
    checked: Callable[..., Any] = found
    return checked


_READERS: dict[str, tuple[Callable[[Mapping[str, Any], str, int], Grader], tuple[str, ...]]] = {
    "string_check": (_string_check, ("input", "operation", "reference")),
    "text_similarity": (_text_similarity, ("input", "reference", "evaluation_metric")),
    "multi": (_multi, ("graders", "calculate_output")),
    "python": (_python, ("source",)),
}


def reward(text: str, columns: Collection[str]) -> Callable[..., list[float]]:
    """Return a grader as a reward function of TRL's signature; imports python graders.

    `columns` are those of the data. Raises SpecError.
    """
    grader = read(text)
    missing = next((name for name in grader.columns if name not in columns), None)
    if missing is not None:
        known = ", ".join(columns) or "it has none"
        raise SpecError(OPTION, f"item.{missing} must be a column of the data ({known})")
    for function in grader.functions:
        _imported(function)

    def grade(completions: list[Any], **found: Any) -> list[float]:
        items = [
            {name: found[name][index] for name in columns if name in found}
            for index in range(len(completions))
        ]
        outputs = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
        return [grader.score(output, item) for output, item in zip(outputs, items, strict=True)]

    return grade
