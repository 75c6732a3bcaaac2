"""What a resumed training reports: changed options, more steps, other results than before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import torch
from transformers.trainer import TRAINER_STATE_NAME

from ..context import Context, step_of
from ..spec import shown
from .options import TrainingSpec
from .provenance import differences


def report_options(ctx: Context, spec: TrainingSpec, checkpoint: Path) -> None:
    """Emit the options changed since a checkpoint. Raises SpecError for a forbidden change."""
    changes = spec.changes(ctx.checkpoints.about(checkpoint).get("options", {}))
    if changes:
        texts = [f"{n} {shown(now)} (was {shown(then)})" for n, (then, now) in changes.items()]
        ctx.emit("revised", changes=changes, message=", ".join(texts))


def report_extension(
    ctx: Context, checkpoint: Path, *, steps_total: int, learning_rate: float
) -> None:
    """Emit that a training has more steps than its checkpoint; `learning_rate`: of the next one."""
    before = orjson.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())["max_steps"]
    if before < steps_total:
        metrics = ctx.checkpoints.about(checkpoint)["metrics"]
        ctx.emit(
            "extended",
            steps_before=before,
            steps_total=steps_total,
            learning_rate_before=metrics.get("learning_rate"),
            learning_rate=learning_rate,
        )


def warn_of_differences(
    ctx: Context,
    spec: TrainingSpec,
    checkpoint: Path,
    environment: Mapping[str, Any],
    device: torch.device,
    fixes: Sequence[str],
) -> None:
    """Warn where further results differ from those of an uninterrupted training.

    `environment`: of this execution. `fixes`: differences of this version from the checkpoint's.
    """
    changed = differences(ctx.checkpoints.about(checkpoint), environment)
    if device.type != "cpu" and not spec.deterministic:
        changed.append("deterministic is off")
    if changed:
        ctx.emit(
            "warning",
            message=f"the resume from {checkpoint.name} is exact in state, but not bitwise "
            f"({'; '.join(changed)}): sums round differently from here on",
        )
    if fixes:
        ctx.emit(
            "warning",
            message=f"from step {step_of(checkpoint) + 1} on, results differ from those of the "
            f"earlier version that wrote {checkpoint.name}: {'; '.join(fixes)}",
        )
