"""Translates the `method` of a fine-tuning request into options of the job kind that trains.

An HTTP request must not name code or files of this machine, so free-text options are allowed only
when they are listed here as harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....jobs import spec_class
from ....jobs.errors import SpecError
from ....jobs.grpo import problems, rewards
from ....jobs.mlm.options import CODE_GRAPH, STDLIB
from ..core.file_store import FileStore

# Method type -> job kind. `mlm` is an extension of warmd, the others are OpenAI's.
KINDS = {"supervised": "sft", "reinforcement": "grpo", "mlm": "mlm"}
METHODS = {kind: method for method, kind in KINDS.items()}
_FIELDS = {
    "sft": {"hyperparameters"},
    "grpo": {"hyperparameters", "grader"},
    "mlm": {"hyperparameters"},
}

# Job kind -> the option that names the data, and its value for built-in data.
DATA: dict[str, tuple[str, str | None]] = {
    "sft": ("dataset", None),
    "grpo": ("dataset", problems.ARITHMETIC),
    "mlm": ("data", STDLIB),
}
VALIDATION = {"sft": "eval_dataset"}  # job kind -> the option that names the held-out data

_HARMLESS_TEXT = {
    "template",
    "system",
    "save_every",
    "keep_best",
    "reward",
    "custom_required_term",
    "custom_forbidden_term",
    "custom_format_pattern",
}
_NOT_OVER_HTTP = {"report_to"}  # would send data to a third party
# OpenAI's name -> warmd's name, where they differ.
_RENAMED: dict[str, dict[str, str]] = {
    "sft": {"n_epochs": "epochs"},
    "grpo": {"n_epochs": "epochs", "batch_size": "prompts_per_step"},
    "mlm": {},
}


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
) -> tuple[str, dict[str, Any]]:
    """Return the job kind and its options. A SpecError names the field of the request.

    Without a method it is `supervised`, as in OpenAI's API; for arithmetic, which only GRPO has, it
    is `reinforcement`.
    """
    default = "reinforcement" if training_file == problems.ARITHMETIC else "supervised"
    type = default if method is None else method.get("type")
    if not isinstance(type, str) or type not in KINDS:
        raise SpecError("method.type", f"must be one of {', '.join(KINDS)}, got {type!r}")
    kind, inside = KINDS[type], (method or {}).get(type) or {}
    if not isinstance(inside, Mapping):
        raise SpecError(f"method.{type}", "must be an object")
    _check_fields(method or {}, {"type", type}, "method")
    _check_fields(inside, _FIELDS[kind], f"method.{type}")
    given = _hyperparameters(kind, f"method.{type}", inside)
    if "grader" in inside:
        if "reward" in given:
            raise SpecError(
                f"method.{type}.hyperparameters.reward", "must not be given together with grader"
            )
        given["reward"] = _rewards(inside["grader"], f"method.{type}.grader")
    for text in _listed(given.get("reward", ())):
        if str(text).partition("=")[0] not in rewards.NAMES:
            raise SpecError(
                f"method.{type}.hyperparameters.reward",
                f"must be one of {', '.join(rewards.NAMES)}, got {str(text)[:80]!r}",
            )
    if seed is not None:
        given["seed"] = seed
    given["model"] = None if kind == "mlm" and model == CODE_GRAPH else model
    option, builtin = DATA[kind]
    given[option] = training_file
    if training_file != builtin:
        path = files.locate(training_file, "training_file")
        given[option] = str(path)
        if kind == "grpo" and "samples" not in given:
            given["samples"] = len(problems.load(str(path)))
    if validation_file is not None:
        if kind not in VALIDATION:
            raise SpecError("validation_file", f"must be left out for {type}, got a file")
        given[VALIDATION[kind]] = str(files.locate(validation_file, "validation_file"))
    return kind, given


def _hyperparameters(kind: str, where: str, inside: Mapping[str, Any]) -> dict[str, Any]:
    values = inside.get("hyperparameters") or {}
    if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
        raise SpecError(f"{where}.hyperparameters", "must be an object")
    known = spec_class(kind).options()
    given = {}
    for name, value in values.items():
        if value == "auto" or value is None:
            continue
        if name == "learning_rate_multiplier":
            raise SpecError(
                f"{where}.hyperparameters.{name}",
                f"must be 'auto', got {value!r}; set learning_rate, which is absolute",
            )
        option = known.get(_RENAMED[kind].get(str(name), str(name)))
        is_text = option is not None and option.type is str and option.choices is None
        if (
            option is None
            or option.name in {"model", "seed", DATA[kind][0], *_NOT_OVER_HTTP}
            or (is_text and option.name not in _HARMLESS_TEXT)
        ):
            raise SpecError(f"{where}.hyperparameters.{name}", f"not an option of {kind} over HTTP")
        given[option.name] = value
    return given


def _rewards(grader: Any, where: str) -> list[str]:
    """Return the rewards of a grader: {"type": "warmd", "reward": ["correctness", "math=0.2"]}."""
    if not isinstance(grader, Mapping) or grader.get("type") != "warmd":
        raise SpecError(
            where,
            'must be {"type": "warmd", "reward": [...]} with names of '
            f"{', '.join(rewards.NAMES)}",
        )
    return [str(name) for name in _listed(grader.get("reward", ()))]


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
