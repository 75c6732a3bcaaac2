"""The DPO kind: direct preference optimization of a decoder (arXiv:2305.18290).

`options.py` has its options, `dataset.py` the pairs and their tokens; `trainer.py` holds the
trainer, which needs torch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..context import Context, WarmModel
from ..errors import JobFailed
from ..models.architectures import check_can_generate
from ..packing.padding import check_padding
from ..training import row_job
from ..training.lengths import most_tokens_of_a_row
from ..training.tokens import Examples
from .dataset import Example, Tokenization
from .options import REWARDS, DpoSpec

if TYPE_CHECKING:
    from trl.trainer.dpo_config import DPOConfig

    from .trainer import PreferenceTrainer


def run(spec: DpoSpec, ctx: Context) -> dict[str, Any]:
    """Train until done or `ctx.stop`; resume from the latest checkpoint when there is one.

    Returns steps, loss and rewards on held-out pairs before and after (None without any), the
    folder of the model and the last step's metrics. Raises Stopped and JobFailed.
    """
    checkpoint = ctx.checkpoints.latest()
    begun = time.perf_counter()
    warm = ctx.models.take(spec.model)
    check_can_generate(warm.model)
    if warm.tokenizer.eos_token is None:
        raise JobFailed(f"model: the tokenizer of {spec.model} has no end-of-sequence token")
    rows = row_job.load_rows(spec, ctx)
    how = Tokenization(
        tokenizer=warm.tokenizer,
        max_length=most_tokens_of_a_row(spec.max_length, warm.model, spec.model),
    )
    check_padding(warm)
    examples, held_out = row_job.encode(spec, ctx, rows, how, warm, Example, checkpoint)
    data_done = time.perf_counter()
    steps = row_job.planned_steps(spec, ctx, examples, checkpoint)
    trainer = _trainer(spec, ctx, warm, steps, examples, held_out, rows.fingerprint)
    return row_job.train(
        spec,
        ctx,
        rows,
        trainer,
        checkpoint,
        measured=("loss", *REWARDS),
        max_length=how.max_length,
        loss_type=spec.loss_type,
        beta=spec.beta,
        data_s=data_done - begun,
        trainer_s=time.perf_counter() - data_done,
    )


def _config(spec: DpoSpec, ctx: Context, warm: WarmModel, steps: int) -> DPOConfig:
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
        activation_checkpointing=False,
    )


def _usual_learning_rate(num_parameters: int) -> float:
    if num_parameters < 1e6:
        return 1e-4
    return 1e-5 if num_parameters < 1e8 else 1e-6


def _trainer(
    spec: DpoSpec,
    ctx: Context,
    warm: WarmModel,
    steps: int,
    examples: Examples[Example],
    held_out: Examples[Example],
    data: str,
) -> PreferenceTrainer:
    from ..training.arguments import in_float32
    from ..training.lora import with_adapter
    from ..training.reference import weight_sharing_clone
    from .trainer import PreferenceTrainer

    if spec.lora is not None:
        reference, model = None, with_adapter(warm, in_float32(warm.model), spec)
    else:
        # The warm model is the reference; the policy shares its weights until the first update.
        reference = in_float32(warm.model).requires_grad_(False).eval()
        model = weight_sharing_clone(reference).requires_grad_(True)
    return PreferenceTrainer(
        job=ctx,
        spec=spec,
        config=_config(spec, ctx, warm, steps),
        model=model,
        reference=reference,
        tokenizer=warm.tokenizer,
        examples=examples,
        held_out=held_out,
        data=data,
        eval_every=spec.eval_every,
    )
