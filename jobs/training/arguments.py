"""Arguments of the Trainer that are the same for all training kinds. Imports torch."""

from __future__ import annotations

from typing import Any

import torch

from ..compute.device import has_bfloat16
from ..context import Context
from .options import TrainingSpec


def common_arguments(spec: TrainingSpec, ctx: Context) -> dict[str, Any]:
    """Return keyword arguments for transformers' TrainingArguments and TRL's configs."""
    return {
        "output_dir": str(ctx.run_dir),
        "run_name": ctx.job_id,
        "lr_scheduler_type": spec.lr_scheduler,
        "weight_decay": spec.weight_decay,
        "max_grad_norm": spec.max_grad_norm,
        "seed": spec.seed,
        "save_strategy": "no",  # JobTrainer saves, by spec.save_every
        "report_to": [
            tracker for tracker in spec.report_to if tracker != "none" and ctx.ranks.rank == 0
        ],
        "use_cpu": ctx.device == "cpu",
        "bf16": has_bfloat16(torch.device(ctx.device)),
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
    }


def in_float32(model: Any) -> Any:
    """Return the model with all its weights in float32.

    `Module.float` visits every module, so it is called only if it changes something.
    """
    weights = (*model.parameters(), *model.buffers())
    is_other = any(w.is_floating_point() and w.dtype != torch.float32 for w in weights)
    return model.float() if is_other else model
