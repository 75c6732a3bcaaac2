"""Optimizer and learning-rate schedule, as in the Trainer of transformers. Imports torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import Trainer, get_scheduler
from transformers.trainer_pt_utils import get_parameter_names

# Weights without decay, by their names: those of transformers' Trainer. They come second in the
# optimizer, whose state in a checkpoint is by number.
_NOT_DECAYED = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")


def optimizer_of(model: Any, args: Any) -> Optimizer:
    """Return the optimizer of the trained weights; `args`: transformers.TrainingArguments."""
    decayed = set(get_parameter_names(model, [nn.LayerNorm], list(_NOT_DECAYED)))
    trained = [(name, w) for name, w in model.named_parameters() if w.requires_grad]
    groups = [
        {
            "params": [w for name, w in trained if name in decayed],
            "weight_decay": args.weight_decay,
        },
        {"params": [w for name, w in trained if name not in decayed], "weight_decay": 0.0},
    ]
    kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
    made: Optimizer = kind(groups, **options)
    return made


def schedule_of(optimizer: Optimizer, args: Any, steps: int) -> LambdaLR:
    """Return the learning-rate schedule of a training of `steps` steps."""
    made: LambdaLR = get_scheduler(
        args.lr_scheduler_type,
        optimizer=optimizer,
        num_warmup_steps=args.get_warmup_steps(steps),
        num_training_steps=steps,
        scheduler_specific_kwargs=args.lr_scheduler_kwargs,
    )
    return made


def planned_schedule_of(optimizer: Optimizer, factor: Callable[[int], float]) -> LambdaLR:
    """Return a schedule by plans; `factor`: of the learning rate, by the number of steps done."""
    return LambdaLR(optimizer, lambda step: factor(step))


def restart_schedule(schedule: LambdaLR, learning_rate: float) -> None:
    """Apply this schedule and base rate to an optimizer whose state was loaded from a checkpoint.

    That state holds the learning rate of the old schedule (0.0 at the end of a linear one).
    """
    schedule.base_lrs = [learning_rate for _ in schedule.base_lrs]
    rates = [
        base * factor(schedule.last_epoch)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    schedule._last_lr = rates
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"], group["initial_lr"] = rate, learning_rate


def clip(model: nn.Module, largest: float) -> torch.Tensor:
    """Scale the gradients down to a norm of at most `largest` (0: never); return their norm."""
    return torch.nn.utils.clip_grad_norm_(model.parameters(), largest or float("inf"))
