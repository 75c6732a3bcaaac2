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

from ..sft.dataset import Example
from ..sft.options import SftSpec
from ..sft.task import Supervised
from ..training.arguments import scorer_of
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
            scorer=scorer_of(policy, ctx, tokenizer, config, wants_top=True),
            examples=records,
            held_out=cast(Any, []),
            data="",
        )
        spec = SftSpec(save_every="1000000")
        return own_loop(ctx, spec, config, policy, tokenizer, task, clock)
    trainer = SFTTrainer(
        model=policy,
        args=config,
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([row.stock() for row in records]),
    )
    return trainer


def _records(work: RowsWork, steps: int) -> list[Example]:
    """Return tokenized records of random words, of which the completions are learned."""
    draw = random.Random(1)
    found = []
    for prompt, completion in work.lengths(steps):
        ids = [draw.randrange(2, work.shape.vocab_size) for _ in range(prompt + completion)]
        found.append(Example(ids, [0] * prompt + [1] * completion))
    return found


if __name__ == "__main__":
    main(SFT, _trainer)
