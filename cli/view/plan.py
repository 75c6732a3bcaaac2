"""What a job will take, for `submit --dry-run`: steps, tokens, memory and time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from ...jobs import spec_class
from ...jobs.training.options import TrainingSpec
from ...jobs.training.row_options import RowTrainingSpec
from . import render

# float32 weights, their gradients and both moments of AdamW
_TRAINING_BYTES = 16

# Options that decide how long a step takes.
_GEOMETRY = (
    "model", "architecture", "objective", "prompts_per_step", "num_generations", "batch_size",
    "gradient_accumulation", "max_completion_length", "seq_len", "rollout_dtype",
)  # fmt: skip


def plan(kind: str, spec: Mapping[str, Any], model: Mapping[str, Any] | None) -> dict[str, str]:
    """Return what is known beforehand, by name. `spec` has all options, `model` its settings."""
    found = dict(_sizes(kind, spec))
    count = None if model is None else _parameters(Path(model["path"]))
    if count is not None:
        is_training = issubclass(spec_class(kind), TrainingSpec)
        bytes_each = _TRAINING_BYTES if is_training else 4
        what = "weights, gradients and AdamW" if is_training else "weights in float32"
        found["memory"] = f"{render.size(count * bytes_each)} for {what}; activations come on top"
    return found


def _sizes(kind: str, spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    if kind == "grpo":
        completions = spec["prompts_per_step"] * spec["num_generations"]
        epochs = "1 epoch" if spec["epochs"] == 1 else f"{spec['epochs']} epochs"
        yield "records", f"{spec['samples']} of {spec['dataset']}, {epochs}"
        tokens = spec.get("max_completion_length")
        most = f", at most {completions * tokens:,} tokens" if tokens else ""
        yield "per step", f"{completions} completions{most}"
    elif issubclass(spec_class(kind), RowTrainingSpec):
        yield "rows", f"{spec['samples']} of {spec['dataset']}, {spec['epochs']} epochs"
        yield "per step", f"{spec['batch_size'] * spec['gradient_accumulation']} rows"
    elif kind == "mlm":
        tokens = spec["batch_size"] * spec["gradient_accumulation"] * spec["seq_len"]
        yield "data", f"{spec['data']}, {spec['validation']:.0%} of the documents held out"
        yield "per step", f"at most {tokens:,} tokens"
    elif spec.get("input"):
        path = Path(spec["input"])
        if path.is_file():
            with path.open("rb") as file:
                yield "records", f"{sum(1 for line in file if line.strip())} of {path}"


def _parameters(folder: Path) -> int | None:
    """The parameters of a model folder, by the headers of its safetensors files."""
    count = 0
    try:
        for path in folder.glob("*.safetensors"):
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                header = orjson.loads(file.read(min(size, 100_000_000)))
            count += sum(math.prod(v["shape"]) for k, v in header.items() if k != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return count or None


def is_alike(spec: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether steps of both specs take about the same time."""
    return all(spec.get(name) == other.get(name) for name in _GEOMETRY)
