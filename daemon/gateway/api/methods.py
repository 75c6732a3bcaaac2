"""Translates the `method` of a fine-tuning request into options of the job kind that trains.

An HTTP request must not name code or files of this machine, so free-text options are allowed only
when they are listed here as harmless.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import orjson

from ....jobs import KINDS, spec_class
from ....jobs.errors import SpecError
from ....jobs.graders import grader as graders
from ....jobs.mlm.options import CODE_GRAPH
from ....jobs.rewards import problems, rewards
from ....jobs.spec import HttpMethod, OptionInfo
from ..core.file_store import FileStore

# Text options of every training kind that name neither code nor a file.
_HARMLESS_TEXT = {"save_every", "time_limit", "keep_best", "lora_targets"}
# The reward names of a request; the reward `grader` follows from the field of that name.
_NAMES = tuple(name for name in rewards.NAMES if name != rewards.GRADER)
_EVAL = "eval"
# Its text options over HTTP; `dataset` is a file id, and rewards are checked by their names.
_EVAL_TEXT = {"dataset", "template", "system", "columns", "stop", "reward"}
_EVAL_TEXT |= {"custom_required_term", "custom_forbidden_term", "custom_format_pattern"}
_NOT_OVER_HTTP = {"report_to"}  # would send data to a third party


def method_of(kind: str) -> HttpMethod | None:
    """Return how a job kind is requested over HTTP; None if it is not."""
    return spec_class(kind).http if kind in KINDS else None


def kinds() -> dict[str, str]:
    """Return the job kind of each method, by `method.type`; warmd's own kinds come first."""
    found: dict[str, str] = {}
    for kind in KINDS:
        if (method := method_of(kind)) is not None:
            found.setdefault(method.type, kind)
    return found


def _check_fields(given: Mapping[str, Any], known: set[str], where: str) -> None:
    for name in given:
        if name not in known:
            raise SpecError(f"{where}.{name}", "unknown or not supported")


def type_of(method: Mapping[str, Any] | None, training_file: str) -> Any:
    """Return the type of a method, unchecked.

    Without one it is `supervised`, as in OpenAI's API; for arithmetic, which only GRPO has, it is
    `reinforcement`.
    """
    if method is not None:
        return method.get("type")
    return "reinforcement" if training_file == problems.ARITHMETIC else "supervised"


def extended(
    method: Mapping[str, Any] | None, training_file: str, hyperparameters: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a valid method with further hyperparameters."""
    type = type_of(method, training_file)
    inside = (method or {}).get(type) or {}
    before = inside.get("hyperparameters") or {}
    return {"type": type, type: {**inside, "hyperparameters": {**before, **hyperparameters}}}


def options(
    method: Mapping[str, Any] | None,
    model: str,
    training_file: str,
    validation_file: str | None,
    seed: int | None,
    files: FileStore,
    graders_allowed: Collection[str] = (),
) -> tuple[str, dict[str, Any]]:
    """Return the job kind and its options. A SpecError names the field of the request.

    `graders_allowed`: functions that a python grader may name.

    Without a method it is that of `type_of`.
    """
    type = type_of(method, training_file)
    known = kinds()
    if not isinstance(type, str) or type not in known:
        raise SpecError("method.type", f"must be one of {', '.join(known)}, got {type!r}")
    kind, inside = known[type], (method or {}).get(type) or {}
    http = method_of(kind)
    assert http is not None
    if not isinstance(inside, Mapping):
        raise SpecError(f"method.{type}", "must be an object")
    _check_fields(method or {}, {"type", type}, "method")
    fields = {"hyperparameters", "grader"} if kind == "grpo" else {"hyperparameters"}
    _check_fields(inside, fields, f"method.{type}")
    given = _hyperparameters(kind, http, f"method.{type}", inside)
    if "grader" in inside:
        if "reward" in given:
            raise SpecError(
                f"method.{type}.hyperparameters.reward", "must not be given together with grader"
            )
        given |= grader(inside["grader"], f"method.{type}.grader", graders_allowed)
    if kind == "grpo" and "grader" not in given:
        _check_rewards(given, f"method.{type}.hyperparameters.reward")
    if seed is not None:
        given["seed"] = seed
    given["model"] = None if kind == "mlm" and model == CODE_GRAPH else model
    given[http.training_file] = training_file
    if training_file != http.builtin_data:
        path = files.locate(training_file, "training_file")
        given[http.training_file] = str(path)
        if kind == "grpo" and "samples" not in given:
            given["samples"] = "all"
    if validation_file is not None:
        if http.validation_file is None:
            raise SpecError("validation_file", f"must be left out for {type}, got a file")
        given[http.validation_file] = str(files.locate(validation_file, "validation_file"))
    return kind, given


def _hyperparameters(
    kind: str, http: HttpMethod, where: str, inside: Mapping[str, Any]
) -> dict[str, Any]:
    values = inside.get("hyperparameters") or {}
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise SpecError(f"{where}.hyperparameters", "must be an object")
    known = options_over_http(kind, http)
    given = {}
    for name, value in values.items():
        if value == "auto" or value is None:
            continue
        if name == "learning_rate_multiplier":
            raise SpecError(
                f"{where}.hyperparameters.{name}",
                f"must be 'auto', got {value!r}; set learning_rate, which is absolute",
            )
        option = known.get(http.renamed.get(str(name), str(name)))
        if option is None:
            raise SpecError(f"{where}.hyperparameters.{name}", f"not an option of {kind} over HTTP")
        given[option.name] = value
    return given


def options_over_http(kind: str, http: HttpMethod) -> dict[str, OptionInfo]:
    """Return the options that a request may set; model, data and seed are fields of their own."""
    elsewhere = {"model", "seed", http.training_file, *_NOT_OVER_HTTP}
    harmless = {*_HARMLESS_TEXT, *http.harmless_text}
    return {
        name: option
        for name, option in spec_class(kind).options().items()
        if name not in elsewhere
        and (option.type is not str or option.choices is not None or name in harmless)
    }


def choices_over_http(option: OptionInfo) -> Collection[str] | None:
    """Return the values that a request may choose from; rewards may have a weight, too."""
    return _NAMES if option.name == "reward" else option.choices


def evaluation(given: Mapping[str, Any], files: FileStore, where: str) -> dict[str, Any]:
    """Return the options of an evaluation; `dataset` is a file of `files`. Raises SpecError."""
    found = dict(given)
    for name in given:
        option = spec_class(_EVAL).options().get(name)
        is_text = option is not None and option.type is str and option.choices is None
        if option is None or (is_text and name not in _EVAL_TEXT):
            raise SpecError(f"{where}.{name}", "not an option of eval over HTTP")
    _check_rewards(given, f"{where}.reward")
    dataset = given.get("dataset", problems.ARITHMETIC)
    if dataset != problems.ARITHMETIC:
        found["dataset"] = str(files.locate(str(dataset), f"{where}.dataset"))
    return found


def _check_rewards(given: Mapping[str, Any], where: str) -> None:
    """Raise SpecError for a reward that is not built in: a request must not name code."""
    for text in _listed(given.get("reward", ())):
        if str(text).partition("=")[0] not in _NAMES:
            raise SpecError(where, f"must be one of {', '.join(_NAMES)}, got {str(text)[:80]!r}")


def check_changes(kind: str, changes: Mapping[str, Any]) -> None:
    """Raise SpecError for options that a request must not set, not even when a job is resumed."""
    http = method_of(kind)
    known = {} if http is None else options_over_http(kind, http)
    for name in changes:
        if kind in KINDS and name in spec_class(kind).changeable and name not in known:
            raise SpecError(name, f"not an option of {kind} over HTTP")


def grader(values: Any, where: str, allowed: Collection[str]) -> dict[str, Any]:
    """Return the options of a grader: OpenAI's, or the rewards of warmd by their names.

    {"type": "warmd", "reward": ["correctness", "math=0.2"]} names rewards. `allowed` are the
    functions that a python grader may name. Raises SpecError.
    """
    kind = values.get("type") if isinstance(values, Mapping) else None
    if kind == "warmd":
        return {"reward": [str(name) for name in _listed(values.get("reward", ()))]}
    if kind not in graders.TYPES:
        raise SpecError(
            where,
            f"must have a type of {', '.join(graders.TYPES)}, or "
            '{"type": "warmd", "reward": [...]} with names of '
            f"{', '.join(_NAMES)}, got {str(kind)[:80]!r}",
        )
    text = orjson.dumps(values).decode()
    try:
        functions = graders.read(text).functions
    except SpecError as error:
        raise SpecError(where, error.problem) from None
    for function in functions:
        if function not in allowed:
            raise SpecError(
                where,
                f"a python grader must be one of {', '.join(allowed) or 'none'} (setting "
                f"http_graders), got {function[:80]!r}",
            )
    return {"reward": [rewards.GRADER], "grader": text}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
