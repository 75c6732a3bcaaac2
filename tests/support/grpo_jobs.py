"""GRPO jobs of a second, their weights and step events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import torch
from transformers import AutoModelForCausalLM

from warmd.jobs.grpo.options import GrpoSpec

TIMES = {"generation_s", "training_s", "seconds"}


def spec(**options: Any) -> GrpoSpec:
    """A job of 6 steps of a tiny model, rewarded for digits."""
    small = {
        "samples": 6,
        "num_generations": 4,
        "max_completion_length": 6,
        "reward": ["tiny:digit_share"],
        "learning_rate": 1e-2,
        "save_every": 3,
        "keep": 100,
    }
    return GrpoSpec.parse(small | options)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return dict(model.state_dict())


def same_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def steps(events: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The step events by step, without fields that depend on the clock."""
    return {
        event["step"]: {key: event[key] for key in event.keys() - TIMES}
        for event in events
        if event["type"] == "step"
    }


def rows(path: Path, *content: dict[str, Any]) -> str:
    path.write_bytes(b"\n".join(orjson.dumps(row) for row in content))
    return str(path)
