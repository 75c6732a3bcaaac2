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
_HARMLESS_TEXT = {"save_every", "keep_best", "lora_targets"}
# The reward names of a request; the reward `grader` follows from the field of that name.
_NAMES = tuple(name for name in rewards.NAMES if name != rewards.GRADER)
_NOT_OVER_HTTP = {"report_to"}  # would send data to a third party


def method_of(kind: str) -> HttpMethod | None:
    """Return how a job kind is requested over HTTP; None where it is not."""
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

    Without a method it is `supervised`, as in OpenAI's API; for arithmetic, which only GRPO has, it
    is `reinforcement`.
    """
    default = "reinforcement" if training_file == problems.ARITHMETIC else "supervised"
    type = default if method is None else method.get("type")
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
        given |= _grader(inside["grader"], f"method.{type}.grader", graders_allowed)
    for text in _listed(given.get("reward", ())) if kind == "grpo" else ():
        if str(text).partition("=")[0] not in _NAMES and "grader" not in given:
            raise SpecError(
                f"method.{type}.hyperparameters.reward",
                f"must be one of {', '.join(_NAMES)}, got {str(text)[:80]!r}",
            )
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


def _grader(values: Any, where: str, allowed: Collection[str]) -> dict[str, Any]:
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
        raise SpecError(where, str(error).partition(": ")[2]) from None
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
