"""The event with which a training begins, and its run to the end.

Imports torch only in its functions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..context import step_of

if TYPE_CHECKING:
    from .loop import Training


def announce(training: Training, checkpoint: Path | None, **about: Any) -> str:
    """Emit `begin` with what all kinds have, and `about`; return the choice of GEMM kernels."""
    import torch

    from ..compute.aten_overrides import recorded_choice
    from ..compute.levels import compute_summary

    ctx, model = training.ctx, training.model
    gemm: str = ctx.ranks.from_first(lambda: recorded_choice(ctx.run_dir / "gemm", ctx.device))
    common = {
        "steps_total": training.steps_total,
        "resumed_from": None if checkpoint is None else step_of(checkpoint),
        "parameters": model.num_parameters(),
        "trained_parameters": model.num_parameters(only_trainable=True),
        "device": str(training.args.device),
        "processes": ctx.ranks.size,
        "threads": torch.get_num_threads(),  # of each process
        "gemm": gemm,
        "learning_rate": training.args.learning_rate,
    }
    ctx.emit("begin", **common, **compute_summary(ctx.device), **about)
    return gemm


def run_to_end(training: Training, checkpoint: Path | None, gemm: str) -> None:
    """Train to the end, and write the model. Raises Stopped and JobFailed."""
    from ..compute.aten_overrides import ONEDNN, fast_kernels

    with fast_kernels(onednn=gemm == ONEDNN):
        training.run(checkpoint)
    training.save_model(training.ctx.run_dir / "model")


def by_size(num_parameters: int, small: float, medium: float, large: float) -> float:
    """Return the value for models below 1M parameters, below 100M, or larger ones."""
    if num_parameters < 1e6:
        return small
    return medium if num_parameters < 1e8 else large
