"""The kind `lines`: what `run` does. Imported once, before jobs are forked."""

from pathlib import Path

from transformers import DataCollatorForLanguageModeling, TrainingArguments

from warmd.jobs.training.arguments import common_arguments, in_float32
from warmd.jobs.training.loop import Training
from warmd.jobs.training.row_order import RowTask


def run(spec, ctx):
    """Train until done or stopped; resume from the latest checkpoint when there is one."""
    warm = ctx.models.take(spec.model)
    model = in_float32(warm.model).requires_grad_(True)
    collate = DataCollatorForLanguageModeling(warm.tokenizer, mlm=False)
    lines = Path(spec.dataset).read_text().splitlines()
    rows = [{"input_ids": warm.tokenizer(line)["input_ids"]} for line in lines if line]
    args = TrainingArguments(
        **common_arguments(spec, ctx),
        max_steps=spec.steps_total,
        per_device_train_batch_size=spec.batch_size,
        learning_rate=spec.learning_rate,
    )
    task = RowTask(rows, lambda some: model(**collate(some)).loss, args)
    training = Training(
        ctx=ctx, spec=spec, args=args, model=model, tokenizer=warm.tokenizer, task=task
    )
    training.run(ctx.checkpoints.latest())
    training.save_model(ctx.run_dir / "model")
    return {"steps": training.step, "metrics": training.last_metrics, "model": "model"}
