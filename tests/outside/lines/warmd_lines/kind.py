"""The kind `lines`: what `run` does. Imported once, before jobs are forked."""

from pathlib import Path

from transformers import DataCollatorForLanguageModeling, TrainingArguments

from warmd.jobs.training.arguments import common_arguments, in_float32
from warmd.jobs.training.trainer import JobTrainer


def run(spec, ctx):
    """Train until done or stopped; resume from the latest checkpoint when there is one."""
    warm = ctx.models.take(spec.model)
    lines = Path(spec.dataset).read_text().splitlines()
    trainer = JobTrainer(
        job=ctx,
        spec=spec,
        model=in_float32(warm.model).requires_grad_(True),
        args=TrainingArguments(
            **common_arguments(spec, ctx),
            max_steps=spec.steps_total,
            per_device_train_batch_size=spec.batch_size,
            learning_rate=spec.learning_rate,
        ),
        train_dataset=[{"input_ids": warm.tokenizer(line)["input_ids"]} for line in lines if line],
        data_collator=DataCollatorForLanguageModeling(warm.tokenizer, mlm=False),
        processing_class=warm.tokenizer,
    )
    trainer.train_to_end(ctx.checkpoints.latest())
    trainer.save_final_model(ctx.run_dir / "model")
    return {"steps": trainer.state.global_step, "metrics": trainer.last_metrics, "model": "model"}
