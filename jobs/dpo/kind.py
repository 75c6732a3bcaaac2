"""The DPO kind: direct preference optimization of a decoder (arXiv:2305.18290).

`options.py` has its options, `dataset.py` the pairs and their tokens, `task.py` the loss, which
needs torch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..context import Context, WarmModel
from ..training import row_job
from ..training.lengths import most_tokens_of_a_row
from ..training.row_job import Prepared
from ..training.rows import Rows
from .dataset import Example, Tokenization
from .options import REWARDS, DpoSpec

if TYPE_CHECKING:
    from trl.trainer.dpo_config import DPOConfig

    from ..training.loop import Training
    from .task import Preferences


def run(spec: DpoSpec, ctx: Context) -> dict[str, Any]:
    """Train until done or `ctx.stop`; resume from the latest checkpoint when there is one.

    Returns steps, loss and rewards on held-out pairs before and after (None without any), the
    folder of the model and the last step's metrics. Raises Stopped and JobFailed.
    """
    checkpoint = ctx.checkpoints.latest()
    begun = time.perf_counter()
    warm = ctx.models.take(spec.model)
    data = row_job.prepare(spec, ctx, warm, tokenization_of, Example, checkpoint)
    data_done = time.perf_counter()
    task, training = training_of(spec, ctx, data)
    return row_job.run_training(
        spec,
        ctx,
        data.rows,
        training,
        checkpoint,
        most_tokens=task.scorer.most_tokens,
        measured=("loss", *REWARDS),
        max_length=data.how.max_length,
        loss_type=spec.loss_type,
        beta=spec.beta,
        data_s=data_done - begun,
        trainer_s=time.perf_counter() - data_done,
    )


def tokenization_of(spec: DpoSpec, warm: WarmModel, rows: Rows[Any]) -> Tokenization:
    return Tokenization(
        tokenizer=warm.tokenizer,
        max_length=most_tokens_of_a_row(spec.max_length, warm.model, spec.model),
    )


def config_of(spec: DpoSpec, ctx: Context, warm: WarmModel, steps: int) -> DPOConfig:
    from trl.trainer.dpo_config import DPOConfig

    from ..training.arguments import common_arguments
    from ..training.lora import chosen_learning_rate

    return DPOConfig(
        **common_arguments(spec, ctx),
        max_steps=steps,
        per_device_train_batch_size=spec.batch_size,
        gradient_accumulation_steps=spec.gradient_accumulation,
        learning_rate=chosen_learning_rate(
            spec, ctx, _usual_learning_rate(warm.model.num_parameters())
        ),
        warmup_steps=spec.warmup_steps,
        loss_type=[spec.loss_type],
        beta=spec.beta,
        label_smoothing=spec.smoothing,
        max_length=None,  # the pairs are cut already
        optim="adamw_torch_fused",
    )


def _usual_learning_rate(num_parameters: int) -> float:
    if num_parameters < 1e6:
        return 1e-4
    return 1e-5 if num_parameters < 1e8 else 1e-6


def training_of(
    spec: DpoSpec, ctx: Context, data: Prepared[Example]
) -> tuple[Preferences, Training]:
    from ..sequences.scoring import Scorer
    from ..training.arguments import in_float32, pad_id, router_coefficient
    from ..training.loop import Training
    from ..training.lora import set_dropout, with_adapter, without_dropout
    from ..training.reference import weight_sharing_clone
    from .task import Preferences

    warm, held_out = data.warm, data.held_out
    if spec.lora is not None:
        reference, model = None, with_adapter(warm, in_float32(warm.model), spec)
    else:
        # The warm model is the reference; the policy shares its weights until the first update.
        reference = in_float32(warm.model).requires_grad_(False).eval()
        model = weight_sharing_clone(reference).requires_grad_(True)
    # Policy and reference must differ by what is trained alone.
    for one in (model, reference):
        if one is not None:
            without_dropout(one)
    has_dropout = spec.lora is not None and spec.lora_dropout > 0
    if has_dropout:
        set_dropout(model, spec.lora_dropout)
    args = config_of(spec, ctx, warm, data.steps)
    task = Preferences(
        ctx=ctx,
        args=args,
        model=model,
        reference=reference,
        scorer=Scorer.of(
            model,
            ctx,
            pad_id=pad_id(model, warm.tokenizer),
            is_half=args.bf16,
            router_coefficient=router_coefficient(model, args),
            wants_top=True,
        ),
        examples=data.examples,
        held_out=held_out,
        data=data.rows.fingerprint,
        has_dropout=has_dropout,
    )
    training = Training(
        ctx=ctx,
        spec=spec,
        args=args,
        model=model,
        tokenizer=warm.tokenizer,
        task=task,
        measured=task if held_out else None,
        eval_every=spec.eval_every,
        before_update=task.before_update,
        differences_since=task.differences_since,
    )
    return task, training
