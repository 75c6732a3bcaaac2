"""The SFT kind: supervised fine-tuning of a decoder.

`options.py` has its options, `dataset.py` the rows and their tokens; `trainer.py` holds the
trainer, which needs torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..context import Context, WarmModel, step_of
from ..errors import JobFailed
from ..models.architectures import check_can_generate
from .dataset import Example, Row, Tokenization
from .options import MAX_LENGTH, SftSpec

if TYPE_CHECKING:
    from trl.trainer.sft_config import SFTConfig

    from .trainer import SupervisedTrainer


def run(spec: SftSpec, ctx: Context) -> dict[str, Any]:
    """Train until done or `ctx.stop`; resume from the latest checkpoint when there is one.

    Returns steps, loss and token accuracy on held-out rows before and after (None without any),
    the folder of the model and the last step's metrics. Raises Stopped and JobFailed.
    """
    from ..compute.aten_overrides import ONEDNN, fast_kernels, recorded_choice

    checkpoint = ctx.checkpoints.latest()
    begun = time.perf_counter()
    warm = ctx.models.take(spec.model)
    check_can_generate(warm.model)
    if warm.tokenizer.eos_token is None:
        raise JobFailed(f"model: the tokenizer of {spec.model} has no end-of-sequence token")
    rows = spec.load()
    if rows.num_skipped:
        ctx.emit(
            "warning",
            message=f"dataset: {rows.num_skipped} rows are skipped; the first: {rows.first_fault}",
            rows_skipped=rows.num_skipped,
        )
    how = _tokenization(spec, warm, any(row.is_chat for row in rows.train))
    examples = _examples(ctx, how, rows.train, "train")
    held_out = _examples(ctx, how, rows.held_out, "eval") if rows.held_out else []
    data_done = time.perf_counter()
    trainer = _trainer(spec, ctx, warm, examples, held_out, rows.fingerprint)
    seconds = {"data_s": data_done - begun, "trainer_s": time.perf_counter() - data_done}
    gemm = recorded_choice(ctx.run_dir / "gemm", ctx.device)
    _announce(spec, ctx, trainer, how, checkpoint, gemm, seconds)

    with fast_kernels(onednn=gemm == ONEDNN):
        if checkpoint is None and held_out:
            trainer.check_weights()
            trainer.before = trainer.evaluate_before()
        trainer.train_to_end(checkpoint)
    trainer.save_final_model(ctx.run_dir / "model")
    return {
        "steps": trainer.state.global_step,
        "eval_before": _found(trainer.before),
        "eval_after": _found(trainer.last_eval),
        "model": "model",
        "metrics": trainer.last_metrics,
    }


def _found(evaluation: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if evaluation is None:
        return None
    return {name: evaluation[name] for name in ("loss", "mean_token_accuracy", "n")}


def _tokenization(spec: SftSpec, warm: WarmModel, has_chats: bool) -> Tokenization:
    limit = getattr(warm.model.config.get_text_config(), "max_position_embeddings", None)
    max_length = spec.max_length or min(MAX_LENGTH, limit or MAX_LENGTH)
    if limit is not None and max_length > limit:
        raise JobFailed(
            f"max_length: must be at most {limit} (the positions of {spec.model}), got {max_length}"
        )
    return Tokenization(
        tokenizer=warm.tokenizer,
        max_length=max_length,
        completion_only_loss=spec.completion_only_loss,
        assistant_only_loss=spec.assistant_only_loss,
        training_template=(
            _training_template(warm.tokenizer) if spec.assistant_only_loss and has_chats else None
        ),
    )


def _training_template(tokenizer: Any) -> str | None:
    """Return TRL's variant of a known chat template that marks the assistant; None: its own."""
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    if not tokenizer.chat_template or has_generation_markers(tokenizer.chat_template):
        return None
    try:
        found: str | None = get_training_chat_template(tokenizer)
    except Exception as error:  # it renders the template, which raises anything
        raise JobFailed(
            "assistant_only_loss: must be false for this model: its chat template does not mark "
            "what the assistant says ({% generation %}), and TRL has no variant of it that does"
        ) from error
    return found


def _examples(ctx: Context, how: Tokenization, rows: Sequence[Row], part: str) -> list[Example]:
    examples, lengths = how.encode(rows)
    ctx.emit("lengths", part=part, max_length=how.max_length, **asdict(lengths))
    if not examples:
        raise JobFailed(
            f"max_length: must leave a token to learn in one row at least, got {how.max_length} "
            f"for {len(rows)} rows"
        )
    return examples


def _config(spec: SftSpec, ctx: Context, warm: WarmModel, *, packs: bool) -> SFTConfig:
    from trl.trainer.sft_config import SFTConfig

    from ..training.arguments import common_arguments

    return SFTConfig(
        **common_arguments(spec, ctx),
        max_steps=spec.steps_total,
        # Packs hold all rows of a step, whatever its micro-steps are: the loss is the same.
        per_device_train_batch_size=spec.rows_per_step if packs else spec.batch_size,
        gradient_accumulation_steps=1 if packs else spec.gradient_accumulation,
        learning_rate=spec.learning_rate or _usual_learning_rate(warm.model.num_parameters()),
        warmup_steps=spec.warmup_steps,
        max_length=None,  # the rows are cut already
        dataset_kwargs={"skip_prepare_dataset": True},
        optim="adamw_torch_fused",
        activation_checkpointing=False,
    )


def _usual_learning_rate(num_parameters: int) -> float:
    if num_parameters < 1e6:
        return 1e-3
    return 3e-4 if num_parameters < 1e8 else 2e-5


def _trainer(
    spec: SftSpec,
    ctx: Context,
    warm: WarmModel,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    data: str,
) -> SupervisedTrainer:
    from ..packing.attention import can_pack
    from ..training.arguments import in_float32
    from .trainer import SupervisedTrainer

    model = in_float32(warm.model)
    return SupervisedTrainer(
        job=ctx,
        spec=spec,
        config=_config(spec, ctx, warm, packs=can_pack(model)),
        model=model.requires_grad_(True),
        tokenizer=warm.tokenizer,
        examples=examples,
        held_out=held_out,
        data=data,
        eval_every=spec.eval_every,
    )


def _announce(
    spec: SftSpec,
    ctx: Context,
    trainer: SupervisedTrainer,
    how: Tokenization,
    checkpoint: Path | None,
    gemm: str,
    seconds: dict[str, Any],
) -> None:
    import torch

    from ..compute.levels import compute_summary

    ctx.emit(
        "begin",
        steps_total=spec.steps_total,
        resumed_from=None if checkpoint is None else step_of(checkpoint),
        model=spec.model,
        parameters=trainer.model.num_parameters(),
        device=str(trainer.args.device),
        threads=torch.get_num_threads(),
        gemm=gemm,
        batch_size=spec.batch_size,
        gradient_accumulation=spec.gradient_accumulation,
        max_length=how.max_length,
        packing=trainer.most_tokens is not None,  # false: by padded batches
        pack_tokens=trainer.most_tokens,  # most in one pass of the model
        learning_rate=trainer.args.learning_rate,
        **compute_summary(ctx.device),
        **seconds,
    )
