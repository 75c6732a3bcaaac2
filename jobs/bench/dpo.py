"""One side of the DPO benchmark: times some steps of TRL's or warmd's trainer.

    python -m warmd.jobs.bench.dpo trl|warmd WORK FOLDER STEPS

FOLDER holds the model (`model.py`), pairs are random tokens. Each side has its own process, so that
its memory can be measured. Prints one JSON object. Imports torch and trl.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer

from ..dpo.dataset import Example
from ..dpo.options import DpoSpec
from ..dpo.task import Preferences
from ..training.arguments import scorer_of
from ..training.reference import weight_sharing_clone
from . import machine, model
from .training import Clock, context, main, own_loop, settings
from .works import DPO, RowsWork


def _trainer(side: str, work: RowsWork, folder: Path, steps: int, output: str, clock: Clock) -> Any:
    config = DPOConfig(
        **settings(output, steps),
        per_device_train_batch_size=work.rows,
        max_length=None,
    )
    reference = model.read(folder)
    tokenizer, rows = model.tokenizer(work.shape), _rows(work, steps)
    if side == "warmd":
        ctx = context(output, machine.device())
        policy = weight_sharing_clone(reference).requires_grad_(True)
        task = Preferences(
            ctx=ctx,
            args=config,
            model=policy,
            reference=reference,
            scorer=scorer_of(policy, ctx, tokenizer, config, wants_top=True),
            examples=[
                Example(row["prompt_ids"], row["chosen_ids"], row["rejected_ids"]) for row in rows
            ],
            held_out=[],
            data="",
        )
        spec = DpoSpec(save_every="1000000")
        return own_loop(
            *(ctx, spec, config, policy, tokenizer, task, clock), before_update=task.before_update
        )
    trainer = DPOTrainer(
        model=model.read(folder).requires_grad_(True),
        ref_model=reference,
        args=config,
        processing_class=tokenizer,
        # TRL tokenizes what it is made with: the tokens follow.
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c"}]),
    )
    trainer.train_dataset = Dataset.from_list(rows)
    return trainer


def _rows(work: RowsWork, steps: int) -> list[dict[str, list[int]]]:
    """Return pairs of random tokens."""
    draw = random.Random(1)
    return [
        {
            name: [draw.randrange(2, work.shape.vocab_size) for _ in range(length)]
            for name, length in zip(("prompt_ids", "chosen_ids", "rejected_ids"), pair, strict=True)
        }
        for pair in work.lengths(steps)
    ]


if __name__ == "__main__":
    main(DPO, _trainer)
