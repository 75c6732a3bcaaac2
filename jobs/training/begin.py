"""The `begin` event of a training, and the kernels of its execution. Imports torch in `begin`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..context import Context, step_of

if TYPE_CHECKING:
    from .loop import Training


def begin(
    ctx: Context, training: Training, checkpoint: Path | None, **about: Any
) -> AbstractContextManager[None]:
    """Emit `begin` with fields of every kind and `about`; return the context to train in.

    Its matrix products are those of the execution before, so that a resume keeps its bits.
    """
    import torch

    from ..compute.aten_overrides import ONEDNN, fast_kernels, recorded_choice
    from ..compute.levels import compute_summary

    gemm = ctx.ranks.from_first(lambda: recorded_choice(ctx.run_dir / "gemm", ctx.device))
    model, spec = training.model, cast(Any, training.spec)
    fields = {
        "steps_total": training.steps_total,
        "resumed_from": None if checkpoint is None else step_of(checkpoint),
        "model": spec.model,
        "parameters": model.num_parameters(),
        "trained_parameters": model.num_parameters(only_trainable=True),
        "device": str(training.args.device),
        "processes": ctx.ranks.size,
        "threads": torch.get_num_threads(),  # of each process
        "gemm": gemm,
        "learning_rate": training.args.learning_rate,
        **compute_summary(ctx.device),
    }
    ctx.emit("begin", **{**fields, **about})
    return fast_kernels(onednn=gemm == ONEDNN)
