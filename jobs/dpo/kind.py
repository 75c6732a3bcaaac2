"""The DPO kind: direct preference optimization of a decoder (arXiv:2305.18290).

`options.py` has its options, `dataset.py` the pairs and their tokens, `task.py` the loss, which
needs torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..context import Context, WarmModel
from ..training import row_job
from ..training.begin import by_size
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
    data = prepare(spec, ctx, ctx.models.take(spec.model), ctx.checkpoints.latest())
    task, training = training_of(data)
    return row_job.run_training(
        data,
        training,
        most_tokens=task.scorer.most_tokens,
        measured=("loss", *REWARDS),
        loss_type=spec.loss_type,
        beta=spec.beta,
    )


def prepare(
    spec: DpoSpec, ctx: Context, warm: WarmModel, checkpoint: Path | None = None
) -> Prepared[Example]:
    def encoder_of(_: Rows[Any]) -> Tokenization:
        max_length = most_tokens_of_a_row(spec.max_length, warm.model, spec.model)
        return Tokenization(tokenizer=warm.tokenizer, max_length=max_length)

    return row_job.prepare(spec, ctx, warm, Example, encoder_of, checkpoint)


def config_of(spec: DpoSpec, ctx: Context, warm: WarmModel, steps: int | None) -> DPOConfig:
    from trl.trainer.dpo_config import DPOConfig

    from ..training.arguments import UNPLANNED, common_arguments
    from ..training.lora import chosen_learning_rate

    return DPOConfig(
        **common_arguments(spec, ctx),
        max_steps=UNPLANNED if steps is None else steps,
        per_device_train_batch_size=spec.batch_size,
        gradient_accumulation_steps=spec.gradient_accumulation,
        learning_rate=chosen_learning_rate(
            spec, ctx, by_size(warm.model.num_parameters(), 1e-4, 1e-5, 1e-6)
        ),
        warmup_steps=spec.warmup_steps,
        loss_type=[spec.loss_type],
        beta=spec.beta,
        label_smoothing=spec.smoothing,
        max_length=None,  # the pairs are cut already
        optim="adamw_torch_fused",
    )


def training_of(data: Prepared[Example]) -> tuple[Preferences, Training]:
    from ..training.arguments import in_float32, scorer_of
    from ..training.lora import set_dropout, with_adapter, without_dropout
    from ..training.reference import weight_sharing_clone
    from .task import Preferences

    spec, ctx, warm = data.spec, data.ctx, data.warm
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
        scorer=scorer_of(model, ctx, warm.tokenizer, args, wants_top=True),
        examples=data.examples,
        held_out=data.held_out,
        data=data.rows.fingerprint,
        has_dropout=has_dropout,
    )
    return task, row_job.training_of(data, args, model, task, before_update=task.before_update)
