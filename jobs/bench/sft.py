"""One side of the SFT benchmark: times some steps of TRL's or warmd's trainer.

    python -m warmd.jobs.bench.sft trl|warmd WORK FOLDER STEPS

FOLDER holds the model (`model.py`); records are random words. Each side has its own process, so
that its memory can be measured. Prints one JSON object. Imports torch and trl.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from ..sequences.passes import pack_tokens
from ..sft.dataset import IGNORED, Example
from ..sft.options import SftSpec
from ..sft.task import Supervised
from ..training.arguments import pad_id
from . import machine, model
from .training import Clock, context, main, own_loop, settings
from .works import SFT, RowsWork


def _trainer(side: str, work: RowsWork, folder: Path, steps: int, output: str, clock: Clock) -> Any:
    config = SFTConfig(
        **settings(output, steps),
        per_device_train_batch_size=work.rows,
        max_length=None,
        dataset_kwargs={"skip_prepare_dataset": True},
        learning_rate=2e-5,
    )
    policy, tokenizer = model.read(folder).requires_grad_(True), model.tokenizer(work.shape)
    records = _records(work, steps)
    if side == "warmd":
        ctx = context(output, machine.device())
        task = Supervised(
            ctx=ctx,
            args=config,
            model=policy,
            pad_id=pad_id(policy, tokenizer),
            examples=[Example(row["input_ids"], row["labels"]) for row in records],
            held_out=cast(Any, []),
            data="",
            most_tokens=pack_tokens(policy, ctx),
        )
        spec = SftSpec(save_every="1000000")
        return own_loop(ctx, spec, config, policy, tokenizer, task, clock)
    trainer = SFTTrainer(
        model=policy,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(records),
    )
    return trainer


def _records(work: RowsWork, steps: int) -> list[dict[str, list[int]]]:
    """Return tokenized records of random words, with labels for the completions only."""
    draw = random.Random(1)
    found = []
    for prompt, completion in work.lengths(steps):
        ids = [draw.randrange(2, work.shape.vocab_size) for _ in range(prompt + completion)]
        found.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return found


if __name__ == "__main__":
    main(SFT, _trainer)
