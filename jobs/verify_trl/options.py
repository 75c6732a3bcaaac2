"""The options of a job that TRL's trainers have too. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...configs.precision import NATIVE
from ..errors import SpecError
from ..spec import Spec

KINDS = ("sft", "dpo", "grpo")  # TRL has a trainer for them

# Options without an equal in TRL -> the value with which both sides are trained.
_WITHOUT_EQUAL: Mapping[str, Any] = {
    "processes": 1,
    "nodes": 1,
    "resample": 0,
    "replay": 0,
    "rollout_dtype": "float32",
    "base_precision": NATIVE,
    "lora_dropout": 0.0,  # TRL has it, but draws other random numbers
}
# Those of episodes: TRL takes one for cut whose last token is no end token.
_OF_EPISODES: Mapping[str, Any] = {"mask_truncated_completions": False}
# Options that do not change a step.
_WITHOUT_EFFECT: Mapping[str, Any] = {
    "report_to": (),
    "reward_log": None,
    "save_every": "1000000",
    "keep_best": None,
}


def check_kind(kind: str) -> None:
    """Raise SpecError for a kind that TRL has no trainer of."""
    if kind not in KINDS:
        why = "TRL has no trainer for masked language models" if kind == "mlm" else "TRL has none"
        raise SpecError("job", f"must be of kind sft, dpo or grpo with --trl, got {kind}: {why}")


def comparable(spec: Spec) -> tuple[Spec, list[str]]:
    """Return the spec that both sides are trained with, and what it changes, one line each."""
    if getattr(spec, "agent", None) is not None:
        raise SpecError(
            "job", "must not train an agent with --trl: TRL has no trainer of several contexts"
        )
    known = spec.options()
    wanted = {**_WITHOUT_EQUAL}
    if getattr(spec, "environment", None) is not None:
        wanted |= _OF_EPISODES
    changes = {
        name: value
        for name, value in wanted.items()
        if name in known and getattr(spec, name) != value
    }
    words = [
        f"{name}: {value} on both sides, not {getattr(spec, name)}"
        for name, value in changes.items()
    ]
    quiet = {name: value for name, value in _WITHOUT_EFFECT.items() if name in known}
    return replace(spec, **changes, **quiet), words
