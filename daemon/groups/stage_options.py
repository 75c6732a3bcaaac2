"""The stages of a job file: `stages` has the options of each, `gate` those of the evaluations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...jobs.errors import SpecError

KEYS = ("stages", "gate")
MOST_STAGES = 100
_MOST_QUESTIONS = 10**6
_QUESTIONS = 200  # of the first comparison
_LARGEST = 4  # times as many in the last one, unless the file says otherwise
_SPEAKING = "abcdefghijklmnopqrstuvwxyz0123456789-_."


@dataclass(frozen=True)
class StagePlan:
    """One stage as the file has it."""

    name: str
    options: dict[str, Any]  # raw; they take precedence over those of the file
    has_gate: bool


@dataclass(frozen=True)
class GatePlan:
    """The evaluations at the gates as the file has them."""

    options: dict[str, Any]  # raw, of the kind eval
    questions: int  # of the first comparison
    most_questions: int  # while it is undecided


def stages_of(given: Any) -> list[StagePlan]:
    """Check the list of stages. Raises SpecError."""
    if not isinstance(given, list) or not 1 <= len(given) <= MOST_STAGES:
        raise SpecError("stages", f"must be a list of 1 to {MOST_STAGES} stages")
    found: list[StagePlan] = []
    for number, stage in enumerate(given, 1):
        if not isinstance(stage, Mapping):
            raise SpecError("stages", f"must be a list of options, got {str(stage)[:80]!r}")
        options = {str(name).replace("-", "_"): value for name, value in stage.items()}
        name = options.pop("name", f"stage-{number}")
        is_name = isinstance(name, str) and 0 < len(name) <= 32 and set(name) <= set(_SPEAKING)
        if not is_name or name in {one.name for one in found}:
            raise SpecError(
                "stages", f"must have different names of a-z, 0-9, - and _, got {_cut(name)}"
            )
        has_gate = options.pop("gate", True)
        if not isinstance(has_gate, bool):
            raise SpecError("stages", f"must have gate: true or false, got {str(has_gate)[:80]!r}")
        for option in ("model", "init_from"):
            if option in options:
                raise SpecError("stages", f"must start from the stage before, got {option}")
        found.append(StagePlan(name, options, has_gate))
    return found


def gate_of(given: Any) -> GatePlan | None:
    """Check the options of the gate; None without any. Raises SpecError."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise SpecError("gate", f"must be options of eval, got {str(given)[:80]!r}")
    options = {str(name).replace("-", "_"): value for name, value in given.items()}
    questions = _count("samples", options.pop("samples", _QUESTIONS))
    most = _count("most_samples", options.pop("most_samples", _LARGEST * questions))
    if most < questions:
        raise SpecError("gate", f"must have most_samples of at least {questions}, got {most}")
    for name in ("model", "against"):
        if name in options:
            raise SpecError("gate", f"must leave out {name}: it follows from the stage")
    return GatePlan(options, questions, most)


def _cut(value: Any) -> str:
    """Return a wrong value as a message quotes it."""
    return repr(value)[:80]


def _count(name: str, value: Any) -> int:
    is_count = isinstance(value, int) and not isinstance(value, bool)
    if not is_count or not 1 <= value <= _MOST_QUESTIONS:
        raise SpecError("gate", f"must have {name} from 1 to {_MOST_QUESTIONS}, got {_cut(value)}")
    return int(value)
