"""Arguments of the Trainer that are the same for all training kinds. Imports torch."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments
from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss

from ..compute.device import has_bfloat16
from ..context import Context
from ..models.adapters import unwrapped
from ..sequences.scoring import Scorer
from .options import TrainingSpec

# Activations are kept: TRL recomputes them by default, which is slower. The argument
# has another name before transformers 5.23.
_IS_NAMED_NEW = hasattr(TrainingArguments, "activation_checkpointing")
KEPT_ACTIVATIONS: dict[str, Any] = {
    f"{'activation' if _IS_NAMED_NEW else 'gradient'}_checkpointing": False
}

UNPLANNED = -1  # `max_steps` of a training whose steps are not planned yet


def common_arguments(spec: TrainingSpec, ctx: Context) -> dict[str, Any]:
    """Return keyword arguments for transformers' TrainingArguments and TRL's configs."""
    return {
        "output_dir": str(ctx.run_dir),
        "run_name": ctx.job_id,
        "lr_scheduler_type": spec.lr_scheduler,
        "weight_decay": spec.weight_decay,
        "max_grad_norm": spec.max_grad_norm,
        "seed": spec.seed,
        "save_strategy": "no",  # the loop saves, by spec.save_every
        "report_to": [
            tracker for tracker in spec.report_to if tracker != "none" and ctx.ranks.rank == 0
        ],
        "use_cpu": ctx.device == "cpu",
        "bf16": has_bfloat16(torch.device(ctx.device)),
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "disable_tqdm": True,
        **KEPT_ACTIVATIONS,
    }


def in_float32(model: Any) -> Any:
    """Return the model with all its weights in float32.

    `Module.float` visits every module, so it is called only if it changes something.
    """
    weights = (*model.parameters(), *model.buffers())
    is_other = any(w.is_floating_point() and w.dtype != torch.float32 for w in weights)
    return model.float() if is_other else model


def pad_id(model: Any, tokenizer: Any) -> int:
    """Return the padding token of a tokenizer, its end token if it has none; set it in both.

    As TRL does, so that the saved model and tokenizer agree.
    """
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model.config.get_text_config().pad_token_id = tokenizer.pad_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    return int(tokenizer.pad_token_id)


def counts_first_tokens(model: Any) -> bool:
    """Whether the first token of a row counts among those with a loss, although none predicts it.

    The Trainer of transformers counts it unless it knows that the model's loss shifts the labels:
    it does not know so of GPT-2, whose class is not named `ForCausalLM`.
    """
    loss = LOSS_MAPPING.get(str(getattr(unwrapped(model), "loss_type", None)))
    return loss is not ForCausalLMLoss


def router_coefficient(model: Any, args: Any) -> float:
    """Return the weight of the loss that balances the experts of a mixture, 0 without experts.

    That of `args`, or else the model's own, as in TRL.
    """
    config = model.config.get_text_config()
    if not hasattr(config, "output_router_logits"):
        return 0.0
    own = getattr(config, "router_aux_loss_coef", 0.0)
    return float(own if args.router_aux_loss_coef is None else args.router_aux_loss_coef)


def scorer_of(model: Any, ctx: Context, tokenizer: Any, args: Any, **how: Any) -> Scorer:
    """Return the scorer of a job, by its arguments; `how`: further fields.

    Raises JobFailed for several processes of a model that cannot be packed.
    """
    return Scorer.of(
        model,
        ctx,
        pad_id=pad_id(model, tokenizer),
        is_half=args.bf16,
        router_coefficient=router_coefficient(model, args),
        **how,
    )
